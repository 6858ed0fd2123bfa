"""Recovery times after lost ranks."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.metrics.recovery import PARTS, Recovery
from drawloom.components.phases.forward_backward import ForwardBackward
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Event, Step
from drawloom.graph.problems import ReopenError
from drawloom.graph.testing import build, fake
from support.mutations import put
from support.processes import RanksFailedError, run_ranks
from support.runs import Outcome, command, drawloom, rows, write_corpus

WORDS = (
    "run",
    "tiny.toml",
    "trainer.steps=5",
    "batch.micro_size=1",
    "trainer.on_finish=[]",
    "processes.on_failure=continue",
    "metrics.recovery.use=metrics.recovery",
)


def _run(folder: Path) -> Outcome:
    """Run a process; rank 1 kills itself in its third step."""
    if os.environ["RANK"] == "1":
        calls, run_phase = [0], ForwardBackward.run_phase

        def die_in_third_step(self: Any, step: Step) -> None:
            calls[0] += 1
            if calls[0] == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            run_phase(self, step)

        put(ForwardBackward, "run_phase", die_in_third_step)
    return command(folder, WORDS, None)


def test_a_survived_loss_is_measured_in_metrics_and_table(tmp_path: Path) -> None:
    """The repeated step has all parts' seconds, and `drawloom runs` their sums."""
    write_corpus(tmp_path)
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_run, 2, tmp_path, timeout=90, grace=60)
    assert caught.value.values[0].code == 0, caught.value
    run = tmp_path / "runs/tiny"
    measured = {
        row["step"]: {part: row[f"recovery/{part}"] for part in PARTS if f"recovery/{part}" in row} for row in rows(run)
    }
    assert [step for step in measured if measured[step]] == [3]
    assert measured[3].keys() == {*PARTS} and all(seconds >= 0 for seconds in measured[3].values())
    assert measured[3]["rebuild"] > 0 and sum(measured[3].values()) < 60
    [outcome] = drawloom(tmp_path, "runs", "--format", "json")
    [row] = json.loads(outcome.text[outcome.text.index("{\n") :])["runs"]
    assert row["recovery_seconds"] == pytest.approx(measured[3])


def test_parts_are_the_times_between_marks() -> None:
    """A second loss before the repeated step adds to the same parts, and the step after it has none."""
    now = [0.0]

    def build_node() -> Recovery:
        node: Recovery = build("metrics.recovery", mesh=fake(Mesh))
        node.clock = lambda: now[0]
        return node

    def emit(node: Recovery, kind: Any, time: float) -> None:
        now[0] = time
        node.on_event(Event(kind, None if kind == "run_started" else Step(3, 9)))

    def reopen(node: Recovery, times: tuple[float, float, float]) -> Recovery:
        now[0] = times[0]
        node.on_failure(ReopenError("lost"))
        now[0] = times[1]
        values, node = node.hand_over(), build_node()
        node.take_over(values)
        emit(node, "run_started", times[2])
        return node

    def measure(node: Recovery) -> dict[str, Any]:
        node.measure_on_rank(Step(3, 9))
        return {name.partition("/")[2]: value for name, value in node.compute({}, Step(3, 9)).items()}

    node = build_node()
    emit(node, "step_started", 10)
    emit(node, "phase_ended", 11)
    node = reopen(node, (13, 16, 20))
    emit(node, "step_started", 25)
    assert measure(node) == {"repeat": 1, "detect": 2, "agree": 3, "rebuild": 4, "transfer": 5}
    node = reopen(node, (26, 27, 28))
    emit(node, "step_started", 29)
    assert measure(node) == {"repeat": 1, "detect": 3, "agree": 4, "rebuild": 5, "transfer": 6}
    emit(node, "step_ended", 30)
    emit(node, "step_started", 31)
    assert measure(node) == {}
