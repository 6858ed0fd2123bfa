"""Ports for reinforcement learning: prompts, completions, rewards, and conversations with an environment."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import attrs
import torch
from torch import Tensor

from drawloom import port
from drawloom.components.ports.corpus import Tokenizer, find_end_ids
from drawloom.components.ports.data import IGNORE_INDEX, Example, TokenBatch
from drawloom.components.ports.model import Head
from drawloom.components.state.batch import Batch, leaf
from drawloom.kernels.cross_entropy.logsumexp import logsumexp_in_fixed_order

FAULTS = (
    "malformed_call",
    "unknown_tool",
    "tool_error",
    "tool_timeout",
    "tool_output",
    "environment_error",
    "max_turns",
    "max_tokens",
)
"""Faults in a conversation, ordered as `Completions.faults`."""


@attrs.frozen
class Reply:
    """
    An environment's reply to a turn: its message, a reward or None, and whether the conversation is over.

    `role` is the message's role in a chat template, and `faults` are kinds in FAULTS, one for every fault in the turn.
    """

    message: str
    reward: float | None = None
    is_done: bool = False
    faults: Sequence[str] = ()
    role: str = "user"


class Episode(Protocol):
    """A conversation. It is only used by one thread at a time."""

    def step(self, text: str) -> Reply:
        """Reply to a turn, given without its end token."""


@port
class Environment(Protocol):
    """Partner for a model's turns; an example's prompt is the first message."""

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas for chat templates, by function; often none."""

    def reset(self, example: Example) -> Episode:
        """
        Start a conversation about an example. Random numbers derive from the example alone.

        Called from several threads. Raises UserError for an unsuitable example.
        """


@port
class Tool(Protocol):
    """A function for a model to call, with JSON values as arguments."""

    @property
    def function(self) -> Callable[..., object]:
        """The function; its file is imported again by the process for tools."""

    @property
    def tool_schema(self) -> Mapping[str, Any]:
        """The function's JSON schema, as chat templates expect it. Raises ValueError for an unusable signature."""


class PromptBatch(Batch):
    """
    Prompts, padded on the right: `tokens` is int64 (rows, length), and `lengths`, int64 (rows,), counts their tokens.

    `examples` are the data that the prompts come from, by row, for rewards. `end_ids` end a row's completion; if left
    out, the tokenizer's do. A prompt of weight 0 is not scored.
    """

    tokens: Tensor = leaf("tokens")
    lengths: Tensor = leaf("rows")
    weights: Tensor = leaf("rows")
    examples: tuple[Example, ...] = leaf("host", default=())
    end_ids: tuple[frozenset[int], ...] = leaf("host", default=())

    @classmethod
    def make_meta_batch(cls, rows: int, length: int) -> Self:
        """Return prompts on the meta device, without examples."""
        counts = torch.empty(rows, dtype=torch.int64, device="meta")
        tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
        return cls(tokens, counts, torch.empty_like(counts, dtype=torch.float32))


class PolicyBatch(TokenBatch):
    """
    Sampled completions to learn from: rows of one document, with weights on the completion's tokens.

    `logps`, float32 (rows, length), are the targets' log-probabilities when they were sampled, and `advantages`,
    float32 (rows, length), say how much better a completion is than others of its prompt; both are 0 without a target.
    `temperature`, float32 (), divides the policy's logits; None is 1. With a `tree`, a `PrefixTree`, the
    model computes the rows' shared beginnings once.
    """

    logps: Tensor | None = leaf("tokens", default=None, kw_only=True)
    advantages: Tensor | None = leaf("tokens", default=None, kw_only=True)
    temperature: Tensor | None = leaf("replicated", default=None, kw_only=True)
    tree: Any = leaf("replicated", default=None, kw_only=True)

    @property
    def visible_keys(self) -> Tensor:
        keys = super().visible_keys
        return keys if self.tree is None else self.tree.pack(keys)

    @classmethod
    def make_meta_batch(cls, rows: int, length: int) -> Self:
        """Return a batch on the meta device, without a reference."""
        batch = super().make_meta_batch(rows, length)
        return batch.evolve(logps=batch.weights, advantages=batch.weights)


class Turns(Protocol):
    """Conversations during a call to `Rollouts.sample`, by row key. Used on one rank per row."""

    def restart_rows(self, keys: Sequence[int]) -> None:
        """Forget these rows' turns: they are sampled again from their prompts."""

    def continue_rows(self, keys: Sequence[int], turns: Sequence[Sequence[int]]) -> list[list[int] | None]:
        """
        Return the ids after a row's last turn, by row; None if its conversation is over.

        A turn has the sampled ids with the end token. Samplers may call it for different rows from several threads.
        """


@attrs.frozen(eq=False)
class Prompts:
    """
    Prompts to complete: `tokens`, int64 (rows, length), padded on the right, and `lengths`, int64 (rows,).

    `keys`, int64 (rows,), at least 0 and unique in a rollout, determine a row's random numbers: they do not depend on
    the rows beside it. `end_ids`, by row, end a completion, or a turn; if left out, the tokenizer's do. `examples`, by
    row, are for conversations: with `turns`, a row continues after a turn until `turns` ends it.
    """

    tokens: Tensor
    lengths: Tensor
    keys: Tensor
    end_ids: tuple[frozenset[int], ...] = ()
    examples: tuple[Example, ...] = ()
    turns: Turns | None = None

    def end_ids_by_row(self, tokenizer: Tokenizer) -> tuple[frozenset[int], ...]:
        """Return the ids at the end of a completion, by row."""
        return self.end_ids or (find_end_ids(tokenizer),) * len(self.keys)


class TrajectorySegment(NamedTuple):
    """Part of a trajectory from one source: positions `first` to before `last` in its row."""

    kind: Literal["prompt", "sampled", "environment"]
    first: int
    last: int


def _mark_completions(completions: "Completions") -> Tensor:
    """Return where rows with one turn are sampled: everywhere between `starts` and `ends`."""
    positions = torch.arange(completions.tokens.shape[1])
    return (positions >= completions.starts[:, None]) & (positions < completions.ends[:, None])


@attrs.frozen(eq=False)
class Completions:
    """
    Trajectories on the CPU, one in a row: a prompt, sampled turns with an environment's messages between them, padding.

    `tokens`, int64 (rows, length), are the sampled ids, never text encoded again. After the prompt
    a trajectory is in positions `starts` to before `ends`, int64 (rows,); `is_sampled`, bool (rows, length), is False
    at the environment's tokens. `logps` and `entropies`, float32 (rows, length), belong to the next token, as targets
    do: the log-probability under the distribution that was sampled from, and its entropy in nats; 0 elsewhere.
    `is_ended`, bool (rows,), is False for a cut trajectory. `versions`, int32 (rows, length), count the optimizer steps
    before a token's weights: the oldest ones, if weights changed during its request.

    `routes`, int32 (rows, length, layers, choices), are the sampler's experts for a token, counted from 1, and 0 for
    none; None if the sampler returns no routes.

    With an environment, `rewards`, float64 (rows,), are its rewards, NaN without any, and `turns`, int64 (rows,), and
    `faults`, int64 (rows, kinds in FAULTS), are counts; otherwise these are NaN and 0.
    """

    tokens: Tensor
    starts: Tensor
    ends: Tensor
    logps: Tensor
    entropies: Tensor
    is_ended: Tensor
    is_sampled: Tensor = attrs.field(default=attrs.Factory(_mark_completions, takes_self=True))
    versions: Tensor = attrs.field(
        default=attrs.Factory(lambda self: torch.zeros_like(self.tokens, dtype=torch.int32), takes_self=True)
    )
    turns: Tensor = attrs.field(default=attrs.Factory(lambda self: torch.zeros_like(self.starts), takes_self=True))
    faults: Tensor = attrs.field(
        default=attrs.Factory(lambda self: self.starts.new_zeros(len(self.starts), len(FAULTS)), takes_self=True)
    )
    rewards: Tensor = attrs.field(
        default=attrs.Factory(lambda self: torch.full((len(self.starts),), torch.nan).double(), takes_self=True)
    )
    routes: Tensor | None = None

    @property
    def sampled_counts(self) -> Tensor:
        """Count the sampled tokens by row: int64 (rows,)."""
        return self.is_sampled.sum(1)

    @property
    def oldest_versions(self) -> Tensor:
        """Return the smallest version by row, int32 (rows,), over sampled tokens."""
        return self.versions.masked_fill(~self.is_sampled, torch.iinfo(torch.int32).max).amin(1)

    @property
    def is_target(self) -> Tensor:
        """Return where the next token was sampled: bool (rows, length)."""
        return torch.nn.functional.pad(self.is_sampled[:, 1:], (0, 1))

    def list_segments(self, row: int) -> list[TrajectorySegment]:
        """Return a row's segments in order: the prompt, sampled turns, and an environment's messages between them."""
        start, end = int(self.starts[row]), int(self.ends[row])
        sources = self.is_sampled[row, start:end].tolist()
        changes = [start + index for index in range(1, end - start) if sources[index] != sources[index - 1]]
        parts = pairwise([start, *changes, end])
        rest = (TrajectorySegment("sampled" if sources[a - start] else "environment", a, b) for a, b in parts)
        return [TrajectorySegment("prompt", 0, start), *rest]


@port
class Rollouts(Protocol):
    """
    Sampler of completions from the current policy, and from the whole vocabulary.

    The policy is the softmax of the logits, divided by the temperature, in sampling and in learning. Another
    distribution, such as that of top-p, would have other log-probabilities than the policy that learns.
    """

    @property
    def temperature(self) -> float:
        """Divisor of the logits, above 0."""

    def update_weights(self, purpose: str, step: int) -> None:
        """
        Let the following calls of `sample` for this purpose use the current weights, or such as settings permit.

        A collective over all ranks; the purpose is "train" or "validation". `step` counts the optimizer steps so far,
        and the next one.
        """

    def sample(self, prompts: Sequence[Prompts], purpose: str, step: int) -> list[Completions]:
        """
        Complete every prompt once, by microbatch; rows have one length. A collective.

        The run's seed, `purpose`, `step` and a row's key determine its random numbers; `step` is the first to learn
        from the completions.
        """


ONE_STEP_ROLLOUT = {"minibatches": 1, "epochs": 1, "lag": 0}
"""Largest values of a rollout's settings with which every completion is for one step, and learnt from at once."""


@runtime_checkable
class SamplesInBackground(Protocol):
    """A sampler for completions while the policy trains."""

    def start_sampling(
        self, prompts: Sequence[Prompts], purpose: str, step: int
    ) -> Callable[[], list[Completions]] | None:
        """
        Start to complete prompts as `sample` does. The result waits for the completions, in a collective.

        None if the sampler needs the training stages: call `sample`.
        """


@attrs.frozen
class Answer:
    """
    A completion to score: its text without the end token, its number of tokens with it, and the prompt's example.

    `is_ended` is False for a cut completion. In a conversation the text is the last turn's, and `tokens` counts all
    sampled ones; `reward` is the environment's, and `faults` counts its faults.
    """

    text: str
    tokens: int
    is_ended: bool
    example: Example
    reward: float | None = None
    faults: int = 0


@port(named=True)
class Reward(Protocol):
    """A score for completions. The rewards of a run are added up, each multiplied by its weight."""

    @property
    def weight(self) -> float:
        """Factor in the sum over all rewards; negative for a penalty."""

    def scores(self, answers: Sequence[Answer]) -> Sequence[float | None]:
        """
        Return a score by answer, None if it can't be scored. Raises UserError for an example it can't use.
        """


@runtime_checkable
class ReadsExamples(Protocol):
    """A reward or a sampler with requirements for the prompt's example."""

    def check_example(self, example: Example) -> None:
        """Raise UserError, with its source, for an example without a key, or with another value."""


@runtime_checkable
class ReadableBeforeOpen(Protocol):
    """Examples that can be read before `open`."""

    def read_before_open(self) -> Iterable[Example]:
        """Yield the examples of all splits, with their `source`, lazily."""


@attrs.frozen
class RewardMeans:
    """
    Means over sampled completions, None over nothing: `reward` is the total, and `rewards` are by name.

    `length` is in tokens, and `truncated` the fraction of completions cut at the maximum length.
    """

    completions: int
    reward: float | None
    rewards: Mapping[str, float | None]
    length: float | None
    truncated: float | None


@port
class RewardEvaluation(Protocol):
    """A policy measurement by sampled completions' rewards."""

    def sample_and_average_rewards(self, batches: Iterable[Batch]) -> RewardMeans:
        """
        Complete and score this data-parallel rank's prompts, by microbatch, and return the means over all ranks.

        Ranks have equally many batches. Raises UserError for batches without prompts. A collective.
        """


class RowGrowth(NamedTuple):
    """How many training rows a phase makes from a data row, and how many tokens it adds to a row."""

    rows_per_row: int
    added_tokens: int


@runtime_checkable
class MakesRows(Protocol):
    """A phase's component that replaces each row of the data set by several longer ones, such as completions."""

    @classmethod
    def predict_row_growth(cls, node: Any) -> RowGrowth:
        """Predict the growth from a node's settings."""


@attrs.frozen(eq=False)
class Scored:
    """
    Completions with scores: the rows of a group, `group_size` in succession, have one prompt.

    `scores` is float64 (rows, rewards), NaN where a reward has no score, in the order of `names`. `totals`, float64
    (rows,), are the weighted sums; NaN for a row without any score. `age` counts the optimizer steps since the first
    one that learnt from the rows, sampled at `temperature`. `is_stale`, bool (rows,), is True for a row too old to
    learn from; its total is NaN.
    """

    completions: Completions
    group_size: int
    names: tuple[str, ...]
    scores: Tensor
    totals: Tensor
    age: int = 0
    temperature: float = 1.0
    is_stale: Tensor = attrs.field(
        default=attrs.Factory(lambda self: torch.zeros_like(self.totals, dtype=torch.bool), takes_self=True)
    )


def compute_policy_logps(
    hidden: Tensor, head: Head, targets: Tensor, is_target: Tensor, temperature: Tensor | None
) -> Tensor:
    """
    Return the policy's log-probabilities of targets, at least float32 (rows, length), 0 elsewhere; differentiable.

    hidden: (rows, length, hidden_size); targets: int64 (rows, length); is_target: bool (rows, length); temperature:
    float32 (), or None for 1. Samplers and losses call this function, so both have the same bits.
    """
    if temperature is None:
        return -head.token_losses(hidden, targets.where(is_target, IGNORE_INDEX), is_target.float())[0]
    scale = temperature.expand(targets.shape)
    return head.map_logits(_gather_logps, hidden, targets.clamp_min(0), scale).where(is_target, 0.0)


def _gather_logps(logits: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """Return the targets' log-probabilities, (tokens,), from logits (tokens, vocab_size)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperatures[:, None]
    return wide.gather(-1, targets[:, None])[:, 0] - logsumexp_in_fixed_order(wide)
