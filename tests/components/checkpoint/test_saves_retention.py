"""Which checkpoints are kept."""

import logging
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.checkpoint import reader
from drawloom.components.checkpoint.saves import Retention
from drawloom.components.ports.run import Step
from support.checkpoints import StateNode, checkpointer, save_steps, state_of

CANDIDATES = st.dictionaries(
    st.integers(1, 40),
    st.fixed_dictionaries({}, optional={"loss": st.none() | st.integers(0, 3), "validation_loss": st.integers(0, 3)}),
    max_size=12,
)
POLICIES = st.builds(
    Retention,
    st.integers(1, 5),
    st.none() | st.integers(1, 7),
    st.none() | st.just("validation_loss"),
    st.just("lowest"),
)


@given(CANDIDATES, POLICIES)
def test_exactly_the_checkpoints_of_the_policy_are_kept(
    candidates: dict[int, dict[str, int | None]], policy: Retention
) -> None:
    """Kept for now are the newest, the best, and the newest finite one, and no others."""
    stay = policy.steps_to_keep_for_now(candidates)
    ordered = sorted(candidates)
    expected = set(ordered[len(ordered) - min(policy.keep, len(ordered)) :])
    finite = [step for step in ordered if candidates[step].get("loss", 0) is not None]
    expected |= {max(finite)} if finite else set()
    measured = {
        step: values.get("validation_loss") or 0 for step, values in candidates.items() if "validation_loss" in values
    }
    if policy.best and measured:
        expected.add(max(step for step, number in measured.items() if number == min(measured.values())))
    assert stay == expected


@pytest.mark.parametrize(("best_is", "step"), [("lowest", 1), ("highest", 3)])
def test_best_is_by_the_chosen_metric(best_is: Literal["lowest", "highest"], step: int) -> None:
    """In either direction; checkpoints without the metric are no candidates."""
    candidates: dict[int, dict[str, float | None]] = {
        1: {"accuracy": 0.1},
        2: {"accuracy": 0.5},
        3: {"accuracy": 0.9},
        4: {},
        5: {"accuracy": None},
    }
    assert Retention(1, None, "accuracy", best_is).steps_to_keep_for_now(candidates) == {5, step}


def _steps(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*")}


def test_all_rules_apply_across_a_resume(tmp_path: Path) -> None:
    """Manifests hold the metrics by step, so a resumed run has them too."""
    losses = [5.0, 4.0, 2.0, 3.0, 3.5, 3.6, 3.7, float("nan"), float("nan")]
    for first in (0, 5):
        memory = StateNode()
        node = checkpointer(tmp_path, {"memory": memory}, every=1, keep=1, keep_every=4, best="loss")
        node.restore()
        for index, loss in list(enumerate(losses, 1))[first : first + 5]:
            memory.state = state_of(index)
            node.run_phase(Step(index, 20, state={"loss": loss, "other": "text"}))
    assert _steps(tmp_path) == {3, 4, 7, 8, 9}  # best, multiples of 4, newest finite, newest


def _corrupt(folder: Path, step: int) -> None:
    path = folder / "checkpoints" / f"step-{step}" / "rank-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_corrupt_checkpoint_does_not_displace_a_valid_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of an earlier process is verified before older ones are removed."""
    save_steps(tmp_path, 1, 2, 3)
    _corrupt(tmp_path, 2)
    memory = StateNode()
    node = checkpointer(tmp_path, {"memory": memory}, keep=3)
    assert node.restore() == 3
    memory.state = state_of(4)
    node.save(Step(4, 9))
    assert _steps(tmp_path) == {1, 2, 3, 4}
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"{tmp_path}/checkpoints/step-2 is corrupt, and not counted among those that are kept: "
        "rank-0.safetensors has a checksum mismatch in bytes 0 to 160"
    ]


def test_nothing_is_verified_while_nothing_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying old checkpoints costs as much as saving them."""
    save_steps(tmp_path, 1, 2)
    monkeypatch.setattr(reader, "verify_checkpoint", lambda *_: pytest.fail("it was read"))
    save_steps(tmp_path, 3)
    assert _steps(tmp_path) == {1, 2, 3}
