"""Rollouts: the policy completes the step's prompts, and rewards score the completions."""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.data import TrainingData, find_batch_types
from drawloom.components.ports.distributed import Group, Mesh
from drawloom.components.ports.pipeline import STEP_SPECS
from drawloom.components.ports.rollouts import Answer, Completions, PromptBatch, Prompts, Reward, Rollouts, Scored
from drawloom.components.ports.run import Batching, Event, Events, Step
from drawloom.graph import Ordered, Problem, UserError, between, component, setting
from drawloom.graph.wiring.node import NodeView


@component(writes=("rollouts",))
class Rollout:
    """
    Rollouts: `group_size` completions of each of the step's prompts, scored by all rewards in the recipe.

    Rows in the recipe's batch sizes are prompts: a microbatch has `micro_size` times `group_size` completions. A
    completion's random numbers depend on the seed, the step, and its number in the step: a resumed run draws the same.
    """

    data: TrainingData
    rollouts: Rollouts
    tokenizer: Tokenizer
    batching: Batching
    mesh: Mesh
    events: Events
    rewards: Ordered[Reward]
    group_size: int = setting(default=8, check=between(1, 10_001), doc="completions of each prompt")
    _copy: Group = attrs.field(init=False, default=None)

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

    @classmethod
    def predict_made_rows(cls, node: NodeView) -> tuple[int, int]:
        sampler = node.neighbour("rollouts")
        return node.settings["group_size"], sampler.settings.get("max_tokens", 0) if sampler else 0

    def open(self) -> None:
        """Connect the ranks with the same rows."""
        self._copy = self.mesh.group("pipeline", "tensor")

    def run_phase(self, step: Step) -> None:
        """Sample and score the step's completions, and write `rollouts`, by microbatch."""
        batches = [require_prompts(batch) for batch in self.data.next_step()]
        self.events.emit(Event("data_loaded", step))
        step.state.split(len(batches), STEP_SPECS)
        first = self.batching.first_position(step.index)
        numbers = [[position - first for position in rows] for rows in self.batching.microbatch_positions(step.index)]
        prompts = [repeat_prompts(batch, rows, self.group_size) for batch, rows in zip(batches, numbers, strict=True)]
        completions = self.rollouts.sample(prompts, "train", step.index)
        rewards = dict(zip(self.rewards.names, self.rewards, strict=True))
        step.state["rollouts"] = [
            score_completions(rewards, self.tokenizer, self._copy, batch, sampled, self.group_size)
            for batch, sampled in zip(batches, completions, strict=True)
        ]


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
    return Prompts(tokens, lengths, keys.flatten())


def score_completions(
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
    for row, (ids, start, end, is_ended) in enumerate(
        zip(completions.tokens, completions.starts, completions.ends, completions.is_ended, strict=True)
    ):
        first, last = int(start), int(end)
        text = tokenizer.decode(ids[first : last - bool(is_ended)].tolist())
        yield Answer(text, last - first, bool(is_ended), batch.examples[row // group_size])


def _score_answers_with(name: str, reward: Reward, answers: Sequence[Answer]) -> list[float]:
    """Return a reward's scores, NaN for None. Raises UserError if the reward fails or returns anything else."""
    try:
        scores = reward.scores(answers)
    except UserError as error:
        raise UserError(f"[{name}]: {error}", error.exit_code) from error
    except Exception as error:
        text = f"[{name}] raised {type(error).__name__}: {error}"
        raise UserError(f"{text}; a reward returns None for a completion that it can't score") from error
    if len(scores) != len(answers):
        raise UserError(f"[{name}] returned {len(scores)} scores for {len(answers)} completions; return one for each")
    return [_require_finite_score(name, answer, value) for answer, value in zip(answers, scores, strict=True)]


def _require_finite_score(name: str, answer: Answer, value: float | None) -> float:
    """Return a score, NaN for None. Raises UserError unless it is a finite number or None."""
    if value is None:
        return torch.nan
    if not isinstance(value, int | float) or not torch.isfinite(torch.tensor(float(value))):
        source = answer.example.get("source", "an example")
        raise UserError(f"[{name}] scored a completion of {source} with {value!r}; return a finite number or None")
    return float(value)
