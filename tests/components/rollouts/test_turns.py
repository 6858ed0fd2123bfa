"""Conversations with an environment, sampled by a run's stages."""

import itertools
import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import attrs
import pytest
import torch

from drawloom.components.ports.rollouts import FAULTS, Completions, Prompts, Reply
from drawloom.components.rollouts.stages import StageRollouts
from drawloom.components.rollouts.turns import MAX_CHARACTERS, TurnRollouts
from drawloom.graph import UserError
from support.small_rollouts import END, logits_of, open_run

ENDS = frozenset({END, *range(1, 256, 2)})
"""Many tokens end a turn, so that a random model has several."""

ROOM = 24


@attrs.define
class Script:
    """An environment whose message is the number of tokens in the turn; it ends after `turns`, or raises in one."""

    turns: int = 3
    raises: BaseException | None = None
    message: str = "{}, "
    heard: list[str] = attrs.field(factory=list)
    tool_schemas: tuple[Any, ...] = ()

    def reset(self, example: Any) -> Any:
        return attrs.evolve(self, heard=[])

    def step(self, text: str) -> Reply:
        self.heard.append(text)
        if self.raises and len(self.heard) == 2:
            raise self.raises
        is_done = len(self.heard) == self.turns
        return Reply(self.message.format(len(text)), reward=0.5 if is_done else None, is_done=is_done)


@attrs.define
class FaultyRow:
    """An environment whose first row has a fault in `reset`, or in the first `step`."""

    inner: Any
    name: str
    fault: Any
    tool_schemas: tuple[Any, ...] = ()
    count: Any = attrs.field(factory=lambda: itertools.count())

    def reset(self, example: Any) -> Any:
        if next(self.count):
            return self.inner.reset(example)
        return self.fault() if self.name == "reset" else SimpleNamespace(step=lambda _: self.fault())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_run(tmp_path_factory.mktemp("run"), rollouts={"max_tokens": ROOM}) as objects:
        yield objects


def sample(
    run: Any, environment: Any, keys: list[int], max_turns: int = 8, seconds: float = 60.0, **changes: Any
) -> Completions:
    """Sample conversations after prompts of two lengths."""
    stages = attrs.evolve(run["rollouts"], **changes)
    stages.open()
    nodes = {"sampler": stages, "environment": environment, "tokenizer": run["tokenizer"], "mesh": stages.mesh}
    rollouts = TurnRollouts(**nodes, max_turns=max_turns, seconds=seconds)
    rollouts.open()
    tokens, lengths = torch.tensor([[51, 49, 62], [57, 62, 7]] * (len(keys) // 2)), [3, 2] * (len(keys) // 2)
    prompts = Prompts(tokens, torch.tensor(lengths), torch.tensor(keys), (ENDS,) * len(keys), ({},) * len(keys))
    rollouts.update_weights("train", 4)
    (completions,) = rollouts.sample([prompts], "train", 4)
    return completions


def rebuild_row(run: Any, completions: Completions, row: int) -> list[int]:
    """Return a row's ids by a plain loop: the prompt, and then turns with the script's messages between them."""
    ids: list[int] = completions.tokens[row, : completions.starts[row]].tolist()
    parts = completions.list_segments(row)
    turns = [completions.tokens[row, part.first : part.last].tolist() for part in parts if part.kind == "sampled"]
    for number, turn in enumerate(turns):
        ids += [ord(letter) for letter in f"{len(run['tokenizer'].decode(turns[number - 1][:-1]))}, "] if number else []
        ids += turn
    return ids


@pytest.mark.parametrize("exact", [False, True])
def test_a_trajectory_has_the_sampled_ids_and_the_messages_between_them(run: Any, exact: bool) -> None:
    """
    Ids are the prompt's, and then turns and encoded messages in turn; log-probabilities are a whole pass's.

    Only sampled tokens are targets, draws depend on the key alone, and exact rollouts have the same ids.
    """
    keys = [*range(10)]
    completions = sample(run, Script(), keys, exact=exact)
    assert completions.turns.max() == 3 and completions.versions.equal(completions.is_sampled.int() * 3)
    whole = logits_of(run, completions.tokens).log_softmax(-1)
    following = torch.cat([completions.tokens[:, 1:], completions.tokens[:, :1]], 1)
    expected = whole.gather(-1, following[..., None])[..., 0].where(completions.is_target, 0.0)
    torch.testing.assert_close(completions.logps, expected, atol=1e-4, rtol=1e-4)
    for row in range(10):
        end, parts = int(completions.ends[row]), completions.list_segments(row)
        assert [part.kind for part in parts] == ["prompt", *["sampled", "environment"] * 3][: len(parts)]
        assert [part.first for part in parts[1:]] == [part.last for part in parts[:-1]] and parts[-1].last == end
        assert completions.tokens[row, :end].tolist() == rebuild_row(run, completions, row)
        is_sampled = [part.kind == "sampled" for part in parts for _ in range(part.last - part.first)]
        assert completions.is_sampled[row].tolist() == is_sampled + [False] * (len(following[0]) - end)
        assert completions.is_target[row, :-1].equal(completions.is_sampled[row, 1:])
        has_reward = completions.turns[row] == 3
        assert bool(completions.is_ended[row]) == bool(has_reward) == (completions.rewards[row] == 0.5)
        assert int(completions.sampled_counts[row]) == sum(is_sampled)
    again = sample(run, Script(), [4, 5, 0, 1], exact=False)
    assert again.tokens.equal(completions.tokens[[4, 5, 0, 1]])


def count_faults(completions: Completions) -> dict[str, int]:
    counts = zip(FAULTS, completions.faults.sum(0).tolist(), strict=True)
    return {kind: count for kind, count in counts if count}


def test_a_conversation_that_is_cut_is_not_ended_and_counted(run: Any) -> None:
    """
    Turns without end, a message that does not fit, and an exception of the environment end a row, not the run.

    An exception ends the conversation without a reward; a UserError, for an example, ends the run.
    """
    endless = sample(run, Script(turns=99, message="."), [0, 1, 2, 3], max_turns=2)
    assert (count_faults(endless)["max_turns"], endless.is_ended.tolist()) == (4, [False] * 4)
    assert endless.rewards.isnan().all()
    long = sample(run, Script(message="x" * ROOM), [0, 1, 2, 3])
    assert count_faults(long) == {"max_tokens": 4} and not long.is_ended.any() and long.turns.tolist() == [1] * 4
    assert all(len(long.list_segments(row)) == 2 for row in range(4))
    broken = sample(run, Script(raises=ZeroDivisionError("no")), [0, 1, 2, 3])
    assert count_faults(broken)["environment_error"] >= 2 and broken.rewards.isnan().all()
    with pytest.raises(UserError, match="no answer"):
        sample(run, Script(raises=UserError("no answer")), [0, 1, 2, 3])


def leave() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    "fault",
    [
        lambda: 1 / 0,
        leave,
        lambda: time.sleep(9),
        lambda: None,
        lambda: Reply(None),  # type: ignore[arg-type]
        lambda: Reply("", faults=["a new kind"]),
        lambda: Reply("", reward=math.inf),
        lambda: Reply("x" * (MAX_CHARACTERS + 1)),
    ],
)
def test_a_faulty_environment_ends_its_conversation_alone(run: Any, fault: Any) -> None:
    """
    In `reset` and in `step`, an exception, a delay and a reply that is none are counted, and no other row is changed.
    """
    plain = sample(run, Script(), [*range(4)])
    for name in ("reset", "step"):
        faulty = FaultyRow(Script(), name, fault)
        completions = sample(run, faulty, [*range(4)], seconds=0.2)
        is_faulty = completions.faults[:, FAULTS.index("environment_error")] == 1
        assert int(is_faulty.sum()) == 1 and count_faults(completions).keys() <= {"environment_error", "max_tokens"}
        assert completions.turns[is_faulty].tolist() == [1] and completions.rewards[is_faulty].isnan().all()
        assert completions.ends[~is_faulty].equal(plain.ends[~is_faulty])


def test_half_a_surrogate_pair_is_a_question_mark(run: Any) -> None:
    """A message without an encoding, such as a JSON escape echoed by a tool, is read with a replacement."""
    one, other = (sample(run, Script(message=message), [0, 1]) for message in ("a\ud800", "a?"))
    assert one.tokens.equal(other.tokens) and not count_faults(one).keys() - {"max_tokens"}


@pytest.mark.parametrize(("schemas", "role"), [((), "user"), (({},), "tool")])
def test_the_template_is_checked_for_the_role_of_the_environment(schemas: tuple[Any, ...], role: str) -> None:
    """A template must show the tool's messages after an answer, or without tools the user's."""
    prompts = MagicMock()
    nodes: dict[str, Any] = dict.fromkeys(("sampler", "tokenizer", "mesh"))
    TurnRollouts(**nodes, environment=Script(tool_schemas=schemas), prompts=prompts).check_before_open()
    prompts.check_role_after_answer.assert_called_once_with(role)


def test_passes_ahead_of_the_host_sample_the_same(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that start before the host has read the last ids, as on a GPU, change no bit of conversations."""
    plain, open_rollouts, ahead = sample(run, Script(), [*range(6)]), StageRollouts.open, []

    def open_ahead(rollouts: StageRollouts) -> None:
        open_rollouts(rollouts)
        rollouts._runs_ahead = True

    start = StageRollouts._start_draw

    def start_and_note(rollouts: StageRollouts, **options: Any) -> Any:
        ahead.append("last_ids" in options)
        return start(rollouts, **options)

    monkeypatch.setattr(StageRollouts, "open", open_ahead)
    monkeypatch.setattr(StageRollouts, "_start_draw", start_and_note)
    other = sample(run, Script(), [*range(6)])
    assert sum(ahead) > len(ahead) // 2 and plain.turns.max() > 1
    for name in ("tokens", "ends", "logps", "entropies", "is_sampled", "is_ended", "turns"):
        assert getattr(plain, name).equal(getattr(other, name)), name
