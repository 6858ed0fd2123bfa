"""Which checkpoints stay."""

import logging
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.checkpoint.retention import Retention, RetentionPolicy
from drawloom.components.ports.run import Step
from support.checkpoints import Memory, checkpointer, save_steps, state_of

CANDIDATES = st.dictionaries(
    st.integers(1, 40),
    st.fixed_dictionaries({}, optional={"loss": st.none() | st.integers(0, 3), "validation_loss": st.integers(0, 3)}),
    max_size=12,
)
RULES = st.builds(
    RetentionPolicy,
    st.integers(1, 5),
    st.none() | st.integers(1, 7),
    st.none() | st.just("validation_loss"),
    st.just("lowest"),
)


@given(CANDIDATES, RULES)
def test_each_rule_keeps_what_it_says_and_no_more(
    candidates: dict[int, dict[str, int | None]], rules: RetentionPolicy
) -> None:
    """What stays is exactly what some rule names: the newest, multiples, the best, and the newest finite one."""
    stay = rules.counting(candidates) | rules.for_ever(candidates)
    ordered = sorted(candidates)
    expected = set(ordered[len(ordered) - min(rules.keep, len(ordered)) :])
    expected |= {step for step in ordered if rules.every and not step % rules.every}
    finite = [step for step in ordered if candidates[step].get("loss", 0) is not None]
    expected |= {max(finite)} if finite else set()
    measured = {
        step: values.get("validation_loss") or 0 for step, values in candidates.items() if "validation_loss" in values
    }
    if rules.best and measured:
        expected.add(max(step for step, number in measured.items() if number == min(measured.values())))
    assert stay == expected


@pytest.mark.parametrize(("best_is", "step"), [("lowest", 1), ("highest", 3)])
def test_best_is_by_the_number_that_one_says(best_is: Literal["lowest", "highest"], step: int) -> None:
    """In either direction; checkpoints without it are no candidates."""
    candidates: dict[int, dict[str, float | None]] = {
        1: {"accuracy": 0.1},
        2: {"accuracy": 0.5},
        3: {"accuracy": 0.9},
        4: {},
        5: {"accuracy": None},
    }
    assert RetentionPolicy(1, None, "accuracy", best_is).counting(candidates) == {5, step}


def _steps(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*")}


def test_a_run_keeps_by_all_rules_at_once(tmp_path: Path) -> None:
    """The numbers of each step are in its manifest, so that a run which goes on knows them too."""
    losses = [5.0, 4.0, 2.0, 3.0, 3.5, 3.6, 3.7, float("nan"), float("nan")]
    for first in (0, 5):
        memory = Memory()
        node = checkpointer(tmp_path, {"memory": memory}, every=1, keep=1, keep_every=4, best="loss")
        node.restore()
        for index, loss in list(enumerate(losses, 1))[first : first + 5]:
            memory.state = state_of(index)
            node.run_phase(Step(index, 20, outputs={"loss": loss, "other": "text"}))
    assert _steps(tmp_path) == {3, 4, 7, 8, 9}  # best, multiples of 4, newest finite, newest


def _damage(folder: Path, step: int) -> None:
    path = folder / "checkpoints" / f"step-{step}" / "rank-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_one_takes_no_good_one_s_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What an earlier process has saved is verified before older ones are removed for it."""
    save_steps(tmp_path, 1, 2, 3)
    _damage(tmp_path, 2)
    memory = Memory()
    node = checkpointer(tmp_path, {"memory": memory}, keep=3)
    assert node.restore() == 3
    memory.state = state_of(4)
    node.save(Step(4, 9))
    assert _steps(tmp_path) == {1, 2, 3, 4}
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"{tmp_path}/checkpoints/step-2 is damaged, and is not counted: rank-0.safetensors has other bytes than were "
        "committed"
    ]


def test_nothing_is_read_while_nothing_has_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying old checkpoints would cost as much as saving them."""
    save_steps(tmp_path, 1, 2)
    monkeypatch.setattr(Retention, "_verify", lambda *_: pytest.fail("it was read"))
    save_steps(tmp_path, 3)
    assert _steps(tmp_path) == {1, 2, 3}
