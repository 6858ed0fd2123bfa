"""Phases for reinforcement learning: rollouts, advantages, and the evaluation by rewards."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.data.bytes import Bytes
from drawloom.components.phases.advantages import STD_FLOOR, Advantages, compute_group_advantages
from drawloom.components.phases.evaluate_rewards import EvaluateRewards
from drawloom.components.phases.policy_gradient import PolicyGradient
from drawloom.components.phases.rollout import Rollout, repeat_prompts
from drawloom.components.ports.data import IGNORE_INDEX, MovableData, ValidationData
from drawloom.components.ports.pipeline import Executor
from drawloom.components.ports.rollouts import Answer, Completions, PolicyBatch, PromptBatch, Prompts, Scored
from drawloom.components.ports.run import Batching, Events, Step
from drawloom.components.ports.stages import Parameters
from drawloom.graph import Ordered, RecipeError, UserError
from drawloom.graph.project import Recipe
from drawloom.graph.testing import fake
from support.doubles import Machine
from support.observers_of_runs import TINY

NAN = torch.nan
END = 256


class Echo:
    """A sampler that repeats the prompt's first token key % 3 times, and then ends; key 5 is cut."""

    temperature = 1.0

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], str, int]] = []

    def update_weights(self, purpose: str, step: int) -> None:
        pass

    def sample(self, prompts: Sequence[Prompts], purpose: str, step: int) -> list[Completions]:
        self.calls.append(([part.keys.tolist() for part in prompts], purpose, step))
        return [self._complete(part) for part in prompts]

    def _complete(self, prompts: Prompts) -> Completions:
        rows, length = prompts.tokens.shape
        tokens = torch.full((rows, length + 3), END)
        tokens[:, :length] = prompts.tokens
        is_ended = prompts.keys != 5
        counts = prompts.keys % 3 + is_ended.long()
        for row, (start, count) in enumerate(zip(prompts.lengths.tolist(), counts.tolist(), strict=True)):
            tokens[row, start:] = END
            tokens[row, start : start + count - int(is_ended[row])] = prompts.tokens[row, 0]
        ones = torch.ones(rows, length + 3)
        return Completions(tokens, prompts.lengths, prompts.lengths + counts, -ones, ones, is_ended)


@attrs.frozen
class Count:
    """A reward: how often the example's letter is in the text; None for an example without one."""

    weight: float = 1.0

    def scores(self, answers: Sequence[Answer]) -> list[float | None]:
        return [
            float(answer.text.count(answer.example["letter"])) if answer.example["letter"] else None
            for answer in answers
        ]


@attrs.frozen
class Cut:
    """A reward: 1 for a cut completion."""

    weight: float = -10.0

    def scores(self, answers: Sequence[Answer]) -> list[float]:
        return [float(not answer.is_ended) for answer in answers]


def prompts_of(*letters: str) -> PromptBatch:
    tokens = torch.tensor([[ord(letter), ord(">"), END] for letter in letters])
    examples = tuple({"letter": "" if letter == "z" else letter, "source": f"line {letter}"} for letter in letters)
    return PromptBatch(tokens, torch.full((len(letters),), 2), torch.ones(len(letters)), examples=examples)


def rollout(mesh: Any, batches: list[Any], rewards: dict[str, Any], group_size: int = 2) -> tuple[Rollout, Echo]:
    echo = Echo()
    counts = [len(batch.examples) if isinstance(batch, PromptBatch) else 1 for batch in batches]
    positions = [[10 + sum(counts[:index]) + row for row in range(count)] for index, count in enumerate(counts)]
    phase = Rollout(
        data=fake(MovableData, next_step=lambda: batches),
        rollouts=echo,
        tokenizer=Bytes(),
        batching=fake(Batching, first_row_position=lambda step: 10, microbatch_row_positions=lambda step: positions),
        mesh=mesh,
        events=fake(Events, emit=lambda event: None),
        rewards=Ordered([*rewards.values()], [*rewards]),
        group_size=group_size,
    )
    phase.open()
    return phase, echo


def test_each_prompt_has_a_group_of_scored_completions(one_rank: Any) -> None:
    """
    A prompt's rows follow one another, with keys unique in the step, and every reward sees text and example.

    Totals are weighted sums over the rewards with a score.
    """
    phase, echo = rollout(one_rank, [prompts_of("a", "z"), prompts_of("b", "c")], {"count": Count(2.0), "cut": Cut()})
    step = Step(3, 9)
    phase.run_phase(step)
    assert echo.calls == [([[0, 1, 2, 3], [4, 5, 6, 7]], "train", 3)]
    first, second = step.state["rollouts"]
    assert first.names == ("count", "cut") and first.group_size == 2
    torch.testing.assert_close(first.scores[:, 0], torch.tensor([0.0, 1.0, NAN, NAN]).double(), equal_nan=True)
    torch.testing.assert_close(first.totals, torch.tensor([0.0, 2.0, 0.0, 0.0]).double())
    assert second.totals.tolist() == [2.0, 2 * 2 - 10.0, 0.0, 2.0]


class Broken:
    """A reward with the fault in its text."""

    weight = 1.0

    def __init__(self, result: Any) -> None:
        self.result = result

    def scores(self, answers: Sequence[Answer]) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            ZeroDivisionError("no"),
            r"\[bad\] raised ZeroDivisionError at \S+test_rollout.py:\d+, for a completion of line a: no; a reward",
        ),
        (UserError("line a has no letter", 2), r"\[bad\]: line a has no letter"),
        ([1.0], r"\[bad\] returned 1 scores for 2 completions; return one for each"),
        ([0.0, NAN], r"\[bad\] scored a completion of line a with nan; return a finite number or None"),
        ([0.0, "x"], r"\[bad\] scored a completion of line a with 'x'"),
    ],
)
def test_a_failing_reward_ends_the_run_with_its_name(one_rank: Any, result: Any, message: str) -> None:
    """An exception, missing scores and an invalid score name the reward and the example."""
    phase, _ = rollout(one_rank, [prompts_of("a")], {"bad": Broken(result)})
    with pytest.raises(UserError, match=message):
        phase.run_phase(Step(1, 1))


class Background(Echo):
    """A sampler in the background; `log` has its events, and tokens have the last update's version."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.version = 0

    def update_weights(self, purpose: str, step: int) -> None:
        self.version = step - 1

    def start_sampling(self, prompts: Sequence[Prompts], purpose: str, step: int) -> Any:
        self.log.append(f"start {step} with {self.version}")
        sampled = [
            attrs.evolve(part, versions=part.is_sampled.int() * self.version)
            for part in self.sample(prompts, purpose, step)
        ]

        def wait() -> list[Completions]:
            self.log.append(f"wait {step}")
            return sampled

        return wait


def test_a_server_samples_the_next_rollout_before_the_first_is_awaited(one_rank: Any) -> None:
    """
    With `lag = 1` step i starts the rollout of step i + 1 with the newest weights, and then waits for its own.

    A checkpoint leaves out a rollout without an end; a resumed run goes back to its prompts.
    """
    phase, _ = rollout(one_rank, [prompts_of("a", "b")], {"count": Count()})
    moves: list[int] = []
    batching = fake(
        Batching,
        first_row_position=lambda step: 2 * step,
        microbatch_row_positions=lambda step: [[2 * step, 2 * step + 1]],
    )
    data = fake(MovableData, next_step=phase.data.next_step, next_row_position=8, skip_to_position=moves.append)
    sampler = Background()
    changes: Any = {"rollouts": sampler, "lag": 1, "max_age": 0, "batching": batching, "data": data}
    phase = attrs.evolve(phase, **changes)  # type: ignore[misc]
    phase.open()
    steps = [Step(index, 3) for index in (1, 2, 3)]
    for step in steps:
        phase.run_phase(step)
    assert sampler.log[:3] == ["start 1 with 0", "start 2 with 0", "wait 1"]
    assert sampler.log[3:] == ["start 3 with 1", "wait 2", "start 4 with 2", "wait 3"]
    assert [step.state["rollouts"][0].is_stale.all().item() for step in steps] == [False, True, True]
    assert [step.state["rollouts"][0].totals.isnan().any().item() for step in steps] == [False, True, True]
    state = phase.state_dict()
    assert state == {"missing": 1, "rollouts": {}}
    phase.load_state_dict(state)
    phase.after_restore(3)
    assert moves == [6]
    phase.run_phase(Step(4, 9))
    assert sampler.log[7:] == ["start 4 with 3", "start 5 with 3", "wait 4"] and phase.state_dict()["missing"] == 1


def test_batches_without_prompts_are_refused(one_rank: Any) -> None:
    """Rows of a data set for supervised training can't be completed."""
    phase, _ = rollout(one_rank, [object()], {"count": Count()})
    with pytest.raises(UserError, match="rollouts complete prompts, and the run's batches are object"):
        phase.run_phase(Step(1, 1))


def test_the_policy_learns_completions_and_nothing_else(one_rank: Any) -> None:
    """Weights, targets, log-probabilities and advantages are on sampled tokens in scored rows alone."""
    phase, _ = rollout(one_rank, [prompts_of("a", "z"), prompts_of("b", "c")], {"count": Count()})
    step = Step(1, 1)
    phase.run_phase(step)
    Advantages(truncated="drop").run_phase(step)
    first, second = step.state["batches"]
    assert isinstance(first, PolicyBatch) and first.logps is not None and first.advantages is not None
    first.check()
    # The rows of "a" have 1 and 2 tokens; those of "z" have no score.
    assert first.weights.tolist() == [[0, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0.0] * 6, [0.0] * 6]
    assert first.targets[1].tolist() == [IGNORE_INDEX, ord("a"), END, *[IGNORE_INDEX] * 3]
    assert first.logps.equal(-first.weights)
    assert first.advantages.tolist() == [[0, -0.5, 0, 0, 0, 0], [0, 0.5, 0.5, 0, 0, 0], [0.0] * 6, [0.0] * 6]
    assert first.token_count == sum(2 + count for count in (1, 2, 3, 1)) and first.has_one_document_per_row()
    assert second.weights.sum(1).tolist() == [2, 0, 1, 2]  # the second row was cut


def totals(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("mean", "none", [-1.0, 1.0, 0.0, 0.0, -0.5, 0.0, 0.5]),
        ("others", "none", [-1.5, 1.5, 0.0, 0.0, -1.0, 0.0, 1.0]),
        ("none", "none", [0.0, 2.0, 1.0, 0.1, 0.0, 0.0, 1.0]),
    ],
)
def test_baselines_are_of_the_group(baseline: str, scale: str, expected: list[float]) -> None:
    """A group's mean, or its other rows' mean, is subtracted; a row without a reward has 0 and is in no mean."""
    rewards = totals(0, 2, 1, 0.3, 0.3, 0.1 + 0.2, 0, NAN, 1)
    advantages, is_equal = compute_group_advantages(rewards, 3, baseline, scale)
    wanted = [*expected[:3], *([0.3] * 3 if baseline == "none" else [0.0] * 3), *expected[4:]]
    torch.testing.assert_close(advantages, totals(*wanted))
    assert is_equal.tolist() == [False] * 3 + [True] * 3 + [False] * 3
    if baseline != "none":
        assert advantages[3:6].tolist() == [0.0] * 3  # exactly, although the sums differ in their last bit


def test_scaled_advantages_are_those_of_grpo() -> None:
    """With `std`, a group's advantages are (r - mean) / (std + 1e-4) with Bessel's correction, as in TRL."""
    rewards = torch.rand(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + STD_FLOOR)
    torch.testing.assert_close(compute_group_advantages(rewards.flatten(), 5, "mean", "std")[0], expected.flatten())


def test_equal_rewards_without_a_baseline_are_not_scaled() -> None:
    """A deviation of 0 would multiply the rewards by 10,000: of a group of one reward, and of one completion."""
    rewards = torch.tensor([1.0, 1.0, 0.5, torch.nan], dtype=torch.float64)
    assert compute_group_advantages(rewards, 2, "none", "std")[0].tolist() == [1.0, 1.0, 0.5, 0.0]
    assert compute_group_advantages(rewards[:3], 1, "none", "std")[0].tolist() == [1.0, 1.0, 0.5]


def test_completions_of_a_prompt_have_its_end_ids() -> None:
    """Every completion in a group ends where its prompt's answers end."""
    ends = (frozenset({1, END}), frozenset({END}))
    repeated = repeat_prompts(prompts_of("a", "b").evolve(end_ids=ends), [0, 1], 2)
    assert repeated.end_ids == (ends[0], ends[0], ends[1], ends[1])


def test_equal_groups_are_dropped_on_demand() -> None:
    """Dynamic sampling: rows in a group with one reward have no weight, and others keep theirs."""
    (completions,) = Echo().sample([Prompts(torch.full((4, 2), 65), torch.full((4,), 2), torch.arange(4))], "train", 1)
    step = Step(1, 1)
    step.state["rollouts"] = [Scored(completions, 2, ("r",), torch.zeros(4, 1), totals(1, 1, 0, 1))]
    for equal_groups, counted in (("keep", [True] * 4), ("drop", [False, False, True, True])):
        Advantages(equal_groups=equal_groups).run_phase(step)  # type: ignore[arg-type]
        (batch,) = step.state["batches"]
        assert (batch.weights.sum(1) > 0).tolist() == counted


def test_the_expected_gradient_of_a_bandit_is_that_of_its_mean_reward() -> None:
    """
    Over all groups of 3 draws from two tokens, the mean of A dlogp is (1 - 1/3) p (1 - p), and p (1 - p) for RLOO.
    """
    p = 0.3
    for baseline, factor in (("mean", 1 - 1 / 3), ("others", 1.0), ("none", 1.0)):
        mean = 0.0
        for case in range(8):
            rewards = totals(*((case >> bit) & 1 for bit in range(3)))
            probability = torch.where(rewards == 1, p, 1 - p).prod()
            gradients = rewards - p  # of log-probabilities, with respect to the logit of the token with reward 1
            advantages, _ = compute_group_advantages(rewards, 3, baseline, "none")
            mean += float(probability * (advantages * gradients).mean())
        assert mean == pytest.approx(factor * p * (1 - p))


def test_held_out_prompts_are_completed_alike_at_each_evaluation(mesh_of: Any) -> None:
    """Keys follow from a prompt's number over all ranks, and prompts without a weight do not count."""
    mesh, echo = mesh_of(), Echo()
    padding = prompts_of("b").with_zero_weights()
    phase = EvaluateRewards(
        data=fake(ValidationData, batches=lambda: iter([prompts_of("a", "z"), padding])),
        rollouts=echo,
        tokenizer=Bytes(),
        batching=fake(Batching, dp_rank=1, dp_size=2),
        mesh=mesh,
        device=Machine(),
        rewards={"count": Count()},  # type: ignore[arg-type]
        samples=3,
        every=2,
    )
    phase.open()
    phase.after_restore(0)
    steps = [Step(index, 9) for index in (1, 2)]
    for step in steps:
        phase.run_phase(step)
    assert steps[0].state.number("initial_validation_reward") == steps[1].state.number("validation_reward")
    assert "validation_reward" not in steps[0].state and "initial_validation_reward" not in steps[1].state
    keys = [[3, 4, 5, 9, 10, 11], [15, 16, 17]]
    assert echo.calls == [(keys, "validation", 0)] * 2
    assert steps[1].state.number("validation_reward") == pytest.approx((0 + 1 + 2) / 3)


def test_the_policy_gradient_is_of_the_step_s_batches() -> None:
    """The executor trains on the state from earlier phases."""
    seen: list[Any] = []
    step = Step(1, 1)
    executor = fake(Executor, run_forward_and_backward=seen.append)
    PolicyGradient(executor=executor, parameters=fake(Parameters)).run_phase(step)
    assert seen == [step.state]


SERVER = ("rollouts.use=rollouts.server", "rollouts.max_tokens=4", "rollouts.update_every=4")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["rollout.rewards=[]"], "no completion has a reward"),
        (["rollout.group_size=1"], "a completion alone is its own baseline"),
        (["mesh.context=2"], "[rollouts] samples whole rows, but ranks along 'context' divide rows"),
        (
            ["rollouts.exact=true", "kernels.use=kernels.batch_invariant", "compile.use=stages.compiled"],
            "exact rollouts with a cache need batch-invariant kernels, and torch.compile makes its own",
        ),
        (["collator.use=data.pad_collator"], "[collator] makes TokenBatch, and rollouts complete prompts"),
        (
            ["rollout.lag=2", "rollout.epochs=2", "rollout.max_age=3"],
            "with the lag, completions are at least 4 updates old, and none would have a weight",
        ),
        (
            ["rollout.lag=1", "rollout.max_age=3", *SERVER],
            "by the sampler's update_every, completions may be 4 updates old",
        ),
        (
            ["rollout.lag=1", "batch.ramp=[{until_step=2, size=16}]"],
            "the steps of a rollout have equal batch sizes",
        ),
        (["loss.beta=0.1"], "there is no reference to diverge from"),
        (["loss.reference=adapters"], "the reference has no effect with beta = 0"),
        (["loss.variant=cispo", "loss.clip_low=0.2"], "cispo clips ratios above 1 only"),
        (
            ['trainer.phases=["@rollout", "@policy_gradient", "@sync_gradients", "@lr", "@optimizer", "@report"]'],
            "[policy_gradient] reads batches",
        ),
    ],
)
def test_a_loop_that_can_not_learn_is_refused_before_it_runs(words: list[str], problem: str) -> None:
    """`check` reports a missing reward, rows that are no prompts, settings without effect, and a wrong order."""
    tables: dict[str, Any] = {"vars": {"base": "unused"}, "tokenizer": {"use": "data.bytes"}}
    tables["model"] = {"use": "model.qwen3.dense", **TINY}
    problems = Recipe.load("grpo", *words).with_values(tables).graph.problems
    assert any(problem in str(text) for text in problems), problems


def test_check_names_an_example_without_the_key_of_a_reward(tmp_path: Path) -> None:
    """The third example has no `answer`: its line is in the message; so is a list without a template."""
    lines = [{"prompt": "a", "answer": "b"}, {"prompt": "b", "answer": "b"}, {"prompt": "c", "anwser": "b"}]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tables = {
        "vars": {"base": "unused"},
        "tokenizer": {"use": "data.bytes"},
        "model": {"use": "model.qwen3.dense", **TINY},
        "examples": {"use": "data.json_examples", "paths": [str(tmp_path / "mine.jsonl")]},
    }
    with pytest.raises(RecipeError, match=r"rewards.exact_match\]: .*mine.jsonl:3 has the keys .*not 'answer'"):
        Recipe.load("grpo").with_values(tables).check()
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "a"}], "answer": "b"}))
    with pytest.raises(RecipeError, match=r"mine.jsonl:1 has messages, and no chat template encodes the environment"):
        Recipe.load("tools").with_values(tables).check()


@pytest.mark.parametrize(
    ("recipe", "word", "problem"),
    [
        ("kto", "loss.use=loss.dpo", "[tokens] has answers that are good or bad by themselves"),
        ("dpo", "loss.use=loss.kto", "learns from answers that are good or bad by themselves, and the data have none"),
    ],
)
def test_judged_answers_and_pairs_are_not_mixed_up(recipe: str, word: str, problem: str) -> None:
    """KTO needs judged answers, and judged answers KTO."""
    problems = Recipe.load(recipe, "vars.base=none", 'tokens.paths=["none"]', word).graph.problems
    assert any(problem in str(text) for text in problems), problems
