"""The header and the summary of a run."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.listeners.summary import RunSummary
from drawloom.components.ports.corpus import Split
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.run import Event, Step
from drawloom.graph import Every
from drawloom.graph.testing import build
from support.qwen3 import dense, whole


@attrs.frozen
class Rows:
    """Rows of 8 tokens, 100 to train with."""

    length: int = 8
    fill: float = 1.0

    def fill_rate(self, split: Split) -> float:
        return self.fill

    def count_rows(self, split: Split) -> int:
        return {"train": 100, "validation": 10}[split]

    def batch(self, split: Split, indices: Sequence[int]) -> TokenBatch:
        raise NotImplementedError


@attrs.frozen
class Validation:
    """Some rows of many."""

    def count_evaluated_and_total_rows(self) -> tuple[int, int]:
        return 64, 1234

    def batches(self) -> Iterator[TokenBatch]:
        raise NotImplementedError


@attrs.frozen
class Run:
    """A run with a folder."""

    folder_path: Path
    name: str = "mine"
    seed: int = 0


@attrs.frozen
class TwoHosts:
    """A launch on two machines."""

    node_count: int = 2


@attrs.frozen
class Parts:
    """Sizes and dtypes."""

    global_size: int = 4
    micro_size: int = 2
    parameter: torch.dtype = torch.float32
    compute: torch.dtype = torch.bfloat16
    linear: str = "compute"
    frozen: str = "compute"


def summary(folder: Path, mesh: Any, **parts: Any) -> RunSummary:
    """Return a summary of a run on the CPU."""
    return RunSummary(job=Run(folder), mesh=mesh, device=build("distributed.device", kind="cpu"), **{**EMPTY, **parts})


EMPTY: dict[str, Any] = {
    name: Every()
    for name in ("models", "data", "validation", "batching", "counters", "precision", "launches", "stages")
}


def messages(summary: RunSummary, caplog: pytest.LogCaptureFixture, steps: Sequence[Step]) -> list[str]:
    """Return the lines after the header for a run with these steps, 5 seconds apiece."""
    times = iter([0.0, 5.0 * len(steps)])
    summary.clock = lambda: next(times)
    with caplog.at_level(logging.INFO, "drawloom.run"):
        summary.on_event(Event("run_started"))
        caplog.clear()
        for step in steps:
            summary.on_event(Event("phase_ended", step, "evaluate"))
            summary.on_event(Event("step_ended", step))
        summary.on_event(Event("run_ended"))
    return caplog.messages[0].splitlines()


def test_the_header_describes_the_run(tmp_path: Path, mesh_of: Any) -> None:
    """Parameters count the whole model, tokens the corpus and a step on all ranks, rows the evaluated ones."""
    model = dense()
    parts: dict[str, Any] = {
        "models": Every({"m": model}),
        "data": Every({"d": Rows()}),
        "validation": Every({"v": Validation()}),
        "launches": Every({"p": TwoHosts()}),
    }
    component = Every({"p": Parts()})
    made = summary(tmp_path, mesh_of(sizes={"pipeline": 2}), **parts, batching=component, precision=component)
    count = sum(parameter.numel() for parameter in whole(model).parameters())
    assert made.preview().splitlines() == [
        f"run     mine, in {tmp_path}",
        f"model   Qwen3ForCausalLM, {count:,} parameters, float32, computed in bfloat16",
        "data    800 tokens to learn from; 32 in a step, in microbatches of 2 rows; validation: 64 of 1,234 rows",
        f"device  cpu, 1 process on 2 hosts: pipeline 2, CPU threads: {torch.get_num_threads()}",
    ]


def test_padding_is_not_counted_as_tokens(tmp_path: Path, one_rank: Any) -> None:
    """Half-full rows have half the tokens, and the header has the fill rate."""
    made = summary(tmp_path, one_rank, data=Every({"d": Rows(fill=0.5)}), batching=Every({"p": Parts()}))
    assert made.preview().splitlines()[1] == (
        "data    400 tokens to learn from; about 16 in a step, in microbatches of 2 rows of 8, 50.0 % full"
    )


def test_the_summary_has_time_tokens_the_best_loss_and_the_folder(
    tmp_path: Path, one_rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The best loss is over all steps, not the last; the summary lists the run folder's contents."""
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "export").mkdir()
    losses = {8: 3.0, 9: 2.5, 10: 2.75}
    steps = [Step(index, 10, state={"tokens": float(100), "validation_loss": loss}) for index, loss in losses.items()]
    assert messages(summary(tmp_path, one_rank), caplog, steps) == [
        "trained steps 8 to 10 in 0:00:15: 300 tokens, 20 tokens/s overall",
        "best    validation loss 2.5000 after step 9",
        f"results in {tmp_path}: export, metrics.jsonl",
    ]


def test_a_resumed_run_knows_the_best_loss_from_before(
    tmp_path: Path, one_rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is saved with the run; a finished run says where its results are."""
    first, second = summary(tmp_path, one_rank), summary(tmp_path, one_rank)
    # A checkpoint is saved by a later phase of the same step, and must have it.
    first.on_event(Event("phase_ended", Step(3, 9, state={"validation_loss": 1.5}), "evaluate"))
    second.load_state_dict(first.state_dict())
    lines = messages(second, caplog, [Step(4, 9, state={"validation_loss": 2.0})])
    assert "best    validation loss 1.5000 after step 3" in lines
    assert messages(summary(tmp_path, one_rank), caplog, []) == [f"results in {tmp_path}: "]
