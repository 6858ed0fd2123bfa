"""Rollouts: the policy completes the step's prompts, and rewards score the completions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import getfile
from itertools import islice
from traceback import extract_tb

import attrs
import torch
from torch import Tensor

from drawloom import Every, NodeView, Ordered, Problem, UserError, between, component, internal, setting
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.ports import (
    ONE_STEP_ROLLOUT,
    STEP_SPECS,
    Answer,
    Batching,
    Completions,
    Event,
    Events,
    Example,
    Examples,
    Group,
    Mesh,
    MovableData,
    NodeState,
    PromptBatch,
    Prompts,
    ReadableBeforeOpen,
    ReadsExamples,
    Reward,
    Rollouts,
    RowGrowth,
    SamplesInBackground,
    Scored,
    Step,
    Tokenizer,
    TrajectorySegment,
    find_batch_types,
)

EXAMPLES_CHECKED = 100
"""Examples of a data set that `check` reads."""


@attrs.frozen(eq=False)
class HeldRollout:
    """
    A rollout over several steps: `tensors` by name, (minibatches, rows, ...), the same on every rank.

    `age` counts the steps that have learnt from it.
    """

    tensors: Mapping[str, Tensor]
    age: int
    temperature: float

    def get_completions_of_prompts(self, numbers: Sequence[int], group_size: int, names: tuple[str, ...]) -> Scored:
        """Return the next step's completions of the prompts with these numbers."""
        minibatch, rows = self.age % len(self.tensors["tokens"]), _list_completion_rows(numbers, group_size)
        part = {name: tensor[minibatch, rows] for name, tensor in self.tensors.items()}
        scores, totals = part.pop("scores"), part.pop("totals")
        completions = Completions(**part | {name: part[name] > 0 for name in ("is_ended", "is_sampled")})
        return Scored(completions, group_size, names, scores, totals, age=self.age, temperature=self.temperature)

    def get_rollout_of_next_step(self, epochs: int) -> "HeldRollout | None":
        """Return the rollout for the next step; None if it is used up."""
        is_used_up = self.age + 1 >= epochs * len(self.tensors["tokens"])
        return None if is_used_up else attrs.evolve(self, age=self.age + 1)

    def make_state(self) -> NodeState:
        """Return the state for a checkpoint."""
        return {**self.tensors, "age": self.age, "temperature": self.temperature}

    @classmethod
    def from_state(cls, state: NodeState) -> "HeldRollout":
        """Return the rollout with a state. Raises KeyError for another one's."""
        names = (*HELD, ROUTES) if ROUTES in state else HELD
        return cls({name: state[name] for name in names}, int(state["age"]), float(state["temperature"]))


@component(writes=("rollouts",))
class Rollout:
    """
    Rollouts: `group_size` completions of each prompt, scored by all rewards in the recipe.

    Rows in the recipe's batch sizes are prompts: a microbatch has `micro_size` times `group_size` completions. A
    completion's random numbers depend on the seed, the step, and its number in the rollout: a resumed run draws the
    same. With `minibatches` a rollout has the prompts of several steps, and with `epochs` each step's completions are
    used again after the last one. With a `lag` the policy learns from a rollout started this many rollouts ago, and a
    server samples the next ones meanwhile. Then every rank keeps all ranks' completions, 21 bytes a token, until the
    policy has learnt from them. Checkpoints contain them, except for a server's unfinished rollouts: a
    resumed run samples their prompts again, with its current weights.
    """

    data: MovableData
    rollouts: Rollouts
    tokenizer: Tokenizer
    batching: Batching
    mesh: Mesh
    events: Events
    rewards: Ordered[Reward]
    prompts: Every[Examples] = attrs.field(factory=Every)
    group_size: int = setting("completions of each prompt", default=8, check=between(1, 10_001))
    minibatches: int = setting(
        "steps whose prompts are sampled at once, with one policy", default=1, check=between(1, 10_001)
    )
    epochs: int = setting("passes over the completions of a rollout", default=1, check=between(1, 10_001))
    lag: int = setting(
        "rollouts sampled ahead of the one to learn from: with 1, completions are one update old",
        default=0,
        check=between(0, 101),
    )
    max_age: int | None = setting(
        "updates since sampling after which a completion has no weight; default: no limit",
        default=None,
        check=between(0, 1_000_001),
    )
    _copy: Group = internal(None)
    # the one to learn from first; functions wait for completions
    _ahead: list[HeldRollout | Callable[[], HeldRollout]] = internal(factory=list)
    _missing: int = internal(0)  # rollouts to sample again after a resume

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report a recipe without a reward, and rows that are not prompts."""
        if not node.neighbours("rewards"):
            text = "no completion has a reward"
            yield node.problem("rewards", text, 'write rewards = ["@rewards.*"] and, say, [rewards.exact_match]')
        if data := node.neighbour("data"):
            for writer, batch_type in find_batch_types(data):
                if not issubclass(batch_type, PromptBatch):
                    text = f"[{writer.name}] makes {batch_type.__name__}, and rollouts complete prompts"
                    yield writer.problem("use", text, 'write use = "data.prompt_collator" in a "data.collated"')
        baselines = {other.settings.get("baseline", "none") for other in node.nodes.values()} - {"none"}
        if baselines and node.settings["group_size"] == 1:
            text = "a completion alone is its own baseline, and no reward would change the policy"
            yield node.problem("group_size", text, "write 2 or more, or baseline = 'none' in the advantages")
        sizes = node.neighbour("batching")
        for key, largest in ONE_STEP_ROLLOUT.items():
            if node.settings[key] > largest and sizes and sizes.settings.get("ramp"):
                text = f"the steps of a rollout have equal batch sizes, and [{sizes.name}] changes them"
                yield node.problem(key, text, f"write {key} = {largest}, or leave out ramp")
        age = node.settings["lag"] * node.settings["minibatches"] * node.settings["epochs"]
        max_age = node.settings["max_age"]
        if max_age is not None and max_age < age:
            text = f"with the lag, completions are at least {age} updates old, and none would have a weight"
            yield node.problem("max_age", text, f"write max_age = {age}, or a smaller lag")
        oldest = age + _get_sampler_setting(node, "update_every", 1) - 1
        if max_age is not None and age <= max_age < oldest:
            text = f"by the sampler's update_every, completions may be {oldest} updates old, and have no weight"
            yield node.problem("max_age", text, f"write max_age = {oldest}, or a smaller update_every")
        if node.settings["epochs"] > 1:
            for name, other in node.nodes.items():
                if "epoch_counter" in other.edges and other.settings.get("epochs"):
                    text = f"steps that use completions again draw no prompts, and the length of [{name}] counts these"
                    yield node.problem("epochs", text, f"write {name}.steps instead of {name}.epochs")

    @classmethod
    def predict_row_growth(cls, node: NodeView) -> RowGrowth:
        return RowGrowth(node.settings["group_size"], _get_sampler_setting(node, "max_tokens", 0))

    def check_before_open(self) -> None:
        """Raise UserError if an example, among the first, lacks a reward's key or does not suit the sampler."""
        first: list[Example] = []
        for examples in self.prompts.values():
            if isinstance(examples, ReadableBeforeOpen):
                with suppress(UserError):  # a problem of its own
                    first += islice(examples.read_before_open(), EXAMPLES_CHECKED)
        for name, reader in zip([*self.rewards.names, "rollouts"], [*self.rewards, self.rollouts], strict=True):
            if isinstance(reader, ReadsExamples):
                with _add_name_to_user_errors(name):
                    for example in first:
                        reader.check_example(example)

    def open(self) -> None:
        """Connect the ranks with the same rows."""
        self._copy = self.mesh.group("pipeline", "tensor")

    def run_phase(self, step: Step) -> None:
        """Write the step's scored completions as `rollouts`, by microbatch; sample as many as the lag permits."""
        if self.minibatches * self.epochs == 1 and not self.lag:
            batches, prompts = self._load_prompts_and_update_weights(step, step.index)
            (scored,) = self._score_minibatches(batches, self.rollouts.sample(prompts, "train", step.index))
        else:
            scored = self._learn_from_rollouts_ahead(step)
        step.state["rollouts"] = [self._drop_stale_rows(part, step.index) for part in scored]

    def _learn_from_rollouts_ahead(self, step: Step) -> list[Scored]:
        """Start rollouts up to the lag, and return the first one's completions for this step."""
        step.state.clear_for_new_step(len(self.batching.microbatch_row_positions(1)), STEP_SPECS)
        span = self.minibatches * self.epochs
        while len(self._ahead) <= self.lag:
            self._ahead.append(self._start_rollout(step, step.index + span * len(self._ahead)))
        first = self._ahead.pop(0)
        rollout = first if isinstance(first, HeldRollout) else first()
        if (rest := rollout.get_rollout_of_next_step(self.epochs)) is not None:
            self._ahead.insert(0, rest)
        numbers = self._list_prompt_numbers_by_microbatch(1)
        return [rollout.get_completions_of_prompts(rows, self.group_size, self.rewards.names) for rows in numbers]

    def _drop_stale_rows(self, scored: Scored, index: int) -> Scored:
        """Remove the totals of rows older than `max_age`."""
        if self.max_age is None:
            return scored
        is_stale = index - 1 - scored.completions.oldest_versions > self.max_age
        return attrs.evolve(scored, is_stale=is_stale, totals=scored.totals.masked_fill(is_stale, torch.nan))

    def _list_prompt_numbers_by_microbatch(self, index: int) -> list[list[int]]:
        """Return the numbers of this rank's prompts in a step's global batch, by microbatch."""
        first = self.batching.first_row_position(index)
        return [[position - first for position in rows] for rows in self.batching.microbatch_row_positions(index)]

    def _start_rollout(self, step: Step, first_step: int) -> HeldRollout | Callable[[], HeldRollout]:
        """Sample a rollout whose first step is `first_step`, or start it and return a function to wait for it."""
        batches, prompts = self._load_prompts_and_update_weights(step, 1)
        sampler, wait = self.rollouts, None
        if self.lag and isinstance(sampler, SamplesInBackground):
            wait = sampler.start_sampling(prompts, "train", first_step)
        if wait is not None:
            return lambda: self._collect_from_ranks(self._score_minibatches(batches, wait()))
        completions = sampler.sample(prompts, "train", first_step)
        return self._collect_from_ranks(self._score_minibatches(batches, completions))

    def _load_prompts_and_update_weights(self, step: Step, index: int) -> tuple[list[list[PromptBatch]], list[Prompts]]:
        """Return the next minibatches, with the batch sizes of the step `index`, and their repeated prompts."""
        loaded = [[require_prompts(batch) for batch in self.data.next_step()] for _ in range(self.minibatches)]
        self.events.emit(Event("data_loaded", step))
        step.state.clear_for_new_step(len(loaded[0]), STEP_SPECS)
        numbers = self._list_prompt_numbers_by_microbatch(index)
        size = self._count_prompts(index)
        prompts = [
            repeat_prompts(batch, [number * size + row for row in rows], self.group_size)
            for number, batches in enumerate(loaded)
            for batch, rows in zip(batches, numbers, strict=True)
        ]
        self.rollouts.update_weights("train", step.index)
        return loaded, prompts

    def _count_prompts(self, index: int) -> int:
        """Count the prompts in a step's global batch."""
        return self.batching.first_row_position(index + 1) - self.batching.first_row_position(index)

    def _score_minibatches(
        self, minibatches: Sequence[Sequence[PromptBatch]], sampled: Sequence[Completions]
    ) -> list[list[Scored]]:
        """Score completions, by minibatch and microbatch."""
        completions = iter(sampled)
        rewards = dict(zip(self.rewards.names, self.rewards, strict=True))
        scored = [
            [
                score_completions_on_first_rank(
                    rewards, self.tokenizer, self._copy, batch, next(completions), self.group_size
                )
                for batch in batches
            ]
            for batches in minibatches
        ]
        return [[attrs.evolve(part, temperature=self.rollouts.temperature) for part in parts] for parts in scored]

    def _collect_from_ranks(self, minibatches: Sequence[Sequence[Scored]]) -> HeldRollout:
        """Return all ranks' completions, in the order of the prompts. A collective."""
        length = torch.tensor(max(part.completions.tokens.shape[1] for parts in minibatches for part in parts))
        self.mesh.data_group.max(length)
        size = self._count_prompts(1) * self.group_size
        rows = [
            row
            for rows in self._list_prompt_numbers_by_microbatch(1)
            for row in _list_completion_rows(rows, self.group_size)
        ]
        tensors: dict[str, Tensor] = {}
        has_routes = minibatches[0][0].completions.routes is not None
        for name in (*HELD, ROUTES) if has_routes else HELD:
            parts = [
                torch.cat([_get_padded_tensor(part, name, int(length)) for part in parts]) for parts in minibatches
            ]
            whole = torch.zeros(len(parts), size, *parts[0].shape[1:], dtype=parts[0].dtype)
            whole[:, rows] = torch.stack(parts)
            self.mesh.data_group.sum(whole)  # of rows that are zeros on all ranks but one
            tensors[name] = whole
        return HeldRollout(tensors, 0, self.rollouts.temperature)

    def state_dict(self) -> NodeState:
        """Return the completions for later steps, and the number of rollouts without an end; empty without any."""
        states = [rollout.make_state() for rollout in self._ahead if isinstance(rollout, HeldRollout)]
        if not self._ahead:
            return {}
        rollouts = {str(number): state for number, state in enumerate(states)}
        return {"missing": len(self._ahead) - len(states), "rollouts": rollouts}

    def load_state_dict(self, state: NodeState) -> None:
        """Continue with the rollouts. Raises KeyError for another node's state."""
        if state and state.keys() != {"missing", "rollouts"}:
            raise KeyError(f"the state of rollouts has missing and rollouts, and this one has {sorted(state)}")
        self._missing = state.get("missing", 0)
        rollouts = state.get("rollouts", {})
        self._ahead = [HeldRollout.from_state(rollouts[str(number)]) for number in range(len(rollouts))]

    def after_restore(self, restored_step: int) -> None:
        """Go back to the prompts of unfinished rollouts."""
        if self._missing:
            rows = self._missing * self.minibatches * self._count_prompts(1)
            self.data.skip_to_position(self.data.next_row_position - rows)
            self._missing = 0


def _get_sampler_setting(node: NodeView, key: str, default: int) -> int:
    """Return a setting from the innermost sampler."""
    sampler = node.neighbour("rollouts")
    while sampler and sampler.neighbour("sampler"):
        sampler = sampler.neighbour("sampler")
    return sampler.settings.get(key, default) if sampler else default


BY_TOKEN = ("tokens", "logps", "entropies", "is_sampled", "versions")
BY_ROW = ("starts", "ends", "is_ended", "turns", "faults", "scores", "totals")
HELD = (*BY_TOKEN, *BY_ROW)
"""Names of a rollout's tensors, beside the experts' routes if a sampler returns them."""

ROUTES = "routes"


def _get_padded_tensor(scored: Scored, name: str, length: int) -> Tensor:
    """Return a tensor of scored completions, with tokens padded to `length`, and truth values as uint8."""
    tensor: Tensor = getattr(scored if name in ("scores", "totals") else scored.completions, name)
    if name in (*BY_TOKEN, ROUTES):
        tensor = torch.nn.functional.pad(tensor, (*[0, 0] * (tensor.ndim - 2), 0, length - tensor.shape[1]))
    return tensor.byte() if tensor.dtype == torch.bool else tensor


def _list_completion_rows(numbers: Sequence[int], group_size: int) -> list[int]:
    """Return the rows of prompts' completions in a global batch."""
    return [number * group_size + sample for number in numbers for sample in range(group_size)]


def require_prompts(batch: object) -> PromptBatch:
    """Return the batch if it has prompts. Raises UserError for another class."""
    if isinstance(batch, PromptBatch):
        return batch
    hint = 'use = "data.collated" with a collator such as "data.prompt_collator"'
    raise UserError(f"rollouts complete prompts, and the run's batches are {type(batch).__name__}; write {hint}", 2)


def repeat_prompts(batch: PromptBatch, prompt_numbers: Sequence[int], group_size: int) -> Prompts:
    """Return every prompt `group_size` times in succession; `prompt_numbers`, unique by prompt, make the keys."""
    keys = torch.tensor(prompt_numbers)[:, None] * group_size + torch.arange(group_size)
    tokens, lengths = (column.repeat_interleave(group_size, 0) for column in (batch.tokens, batch.lengths))
    end_ids = tuple(ids for ids in batch.end_ids for _ in range(group_size))
    examples = tuple(example for example in batch.examples for _ in range(group_size))
    return Prompts(tokens, lengths, keys.flatten(), end_ids, examples)


def score_completions_on_first_rank(
    rewards: Mapping[str, Reward],
    tokenizer: Tokenizer,
    ranks_with_same_rows: Group,
    batch: PromptBatch,
    completions: Completions,
    group_size: int,
) -> Scored:
    """
    Score completions on the first rank of `ranks_with_same_rows`. A collective over this group.

    Raises UserError on all its ranks if a reward fails, or returns other than a number or None for each completion.
    """
    answers = [*_decode_answers(tokenizer, batch, completions, group_size)]
    columns = run_on_rank0(
        ranks_with_same_rows, lambda: [_score_answers_with(name, reward, answers) for name, reward in rewards.items()]
    )
    scores = torch.tensor(columns, dtype=torch.float64).view(len(rewards), len(answers)).T
    weights = torch.tensor([reward.weight for reward in rewards.values()], dtype=torch.float64)
    is_scored = (~scores.isnan()).any(1) & (batch.weights.repeat_interleave(group_size) > 0)
    totals = torch.where(is_scored, (scores * weights).nansum(1), torch.nan)
    return Scored(completions, group_size, tuple(rewards), scores, totals)


def _decode_answers(
    tokenizer: Tokenizer, batch: PromptBatch, completions: Completions, group_size: int
) -> Iterator[Answer]:
    """Yield the decoded answers, in the completions' order."""
    columns = (completions.is_ended, completions.sampled_counts, completions.rewards, completions.faults.sum(1))
    for row, (is_ended, count, reward, faults) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        yield Answer(
            text=decode_segment(tokenizer, completions, row, completions.list_segments(row)[-1]),
            tokens=count,
            is_ended=is_ended,
            example=batch.examples[row // group_size],
            reward=None if reward != reward else reward,
            faults=faults,
        )


def decode_segment(tokenizer: Tokenizer, completions: Completions, row: int, segment: TrajectorySegment) -> str:
    """Return a segment's text, without the end token of a turn."""
    has_end = segment.kind == "sampled" and (segment.last < completions.ends[row] or completions.is_ended[row])
    return tokenizer.decode(completions.tokens[row, segment.first : segment.last - bool(has_end)].tolist())


@contextmanager
def _add_name_to_user_errors(name: str) -> Iterator[None]:
    """Add a reward's name to a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"[{name}]: {error}", error.exit_code) from error


def _score_answers_with(name: str, reward: Reward, answers: Sequence[Answer]) -> list[float]:
    """Return a reward's scores, NaN for None. Raises UserError if the reward fails or returns anything else."""
    try:
        with _add_name_to_user_errors(name):
            scores = reward.scores(answers)
    except UserError:
        raise
    except Exception as error:
        text = f"[{name}] raised {type(error).__name__} at {_locate_failure(reward, answers, error)}: {error}"
        raise UserError(f"{text}; a reward returns None for a completion that it can't score") from error
    if len(scores) != len(answers):
        raise UserError(f"[{name}] returned {len(scores)} scores for {len(answers)} completions; return one for each")
    return [_require_finite_score_or_nan(name, answer, value) for answer, value in zip(answers, scores, strict=True)]


def _locate_failure(reward: Reward, answers: Sequence[Answer], error: Exception) -> str:
    """Return the last place that an exception passed in the reward's file, and the first example that fails again."""
    frames = extract_tb(error.__traceback__)
    last = ([frame for frame in frames if frame.filename == getfile(type(reward))] or frames)[-1]
    for answer in answers:
        try:
            reward.scores([answer])
        except Exception:
            source = answer.example.get("source", "an example")
            return f"{last.filename}:{last.lineno}, for a completion of {source}"
    return f"{last.filename}:{last.lineno}"


def _require_finite_score_or_nan(name: str, answer: Answer, value: float | None) -> float:
    """Return a score, NaN for None. Raises UserError unless it is a finite number or None."""
    if value is None:
        return torch.nan
    if not isinstance(value, int | float) or not torch.isfinite(torch.tensor(float(value))):
        source = answer.example.get("source", "an example")
        raise UserError(f"[{name}] scored a completion of {source} with {value!r}; return a finite number or None")
    return float(value)
