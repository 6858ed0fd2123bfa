"""Memory at a run's start, and out of memory."""

import logging
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.listeners.memory import MemoryReport
from drawloom.components.listeners.out_of_memory import is_out_of_memory
from drawloom.components.ports.features import MemoryKind
from drawloom.components.ports.run import Event
from drawloom.components.ports.stages import Recompute
from drawloom.graph import Every, UserError
from support.doubles import Machine

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB")


@attrs.frozen
class User:
    """A node with masters and optimizer state."""

    def device_bytes(self) -> Mapping[MemoryKind, int]:
        return {"masters": 4_000_000, "optimizer_state": 8_000_000_000}


@attrs.frozen
class Sizes:
    """TokenBatch sizes and dtypes."""

    micro_size: int = 8
    length: int = 4096
    compute: torch.dtype = torch.float32
    parameter: torch.dtype = torch.float32
    recompute: Recompute = "none"

    @property
    def local(self) -> list[Any]:
        return [self]


def report(mesh: Any, schedules: Any = None, **sizes: Any) -> MemoryReport:
    """Return a report for one user; nodes have names of their own."""
    made = Sizes(**sizes)
    parts: Any = {"batching": Every({"rows": made}), "precision": Every({"dtypes": made}), "stages": Every({"s": made})}
    parts |= {"data": Every({"packing": made}), "schedules": schedules or Every({})}
    return MemoryReport(
        device=Machine(used=9_000_000_000), users=Every({"optimizer": User()}), mesh=Every({"mesh": mesh}), **parts
    )


@attrs.frozen
class Choosing:
    """A schedule with its own choice of recomputation for stages."""

    recompute: Mapping[str, Any] = attrs.field(factory=lambda: {"blocks": {"again": 0.9, "kept": 0.1}})


def test_out_of_memory_names_the_schedule_that_chooses_recomputation(one_rank: Any) -> None:
    """The message names no policy of the stages, refused by `check` beside such a schedule."""
    schedules: Any = Every({"order": Choosing()})
    message = str(report(one_rank, schedules=schedules).on_failure(CUDA))
    assert "order.memory: with less, stages keep fewer activations, and compute more of them again" in message
    assert "s.recompute" not in message


def test_the_start_of_a_run_logs_memory_in_one_line(one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The sum first, then each kind; nothing at other events."""
    with caplog.at_level(logging.INFO, "drawloom.run"):
        for kind in ("run_started", "run_ended"):
            report(one_rank).on_event(Event(kind))
    assert caplog.messages == ["memory  8.00 GB  masters 4.0 MB  optimizer state 8.00 GB"]


def test_out_of_memory_names_the_allocation_kinds_and_settings(one_rank: Any) -> None:
    """The report has the recipe's node names and present values; activations are the rest of the peak."""
    error = report(one_rank).on_failure(CUDA)
    assert isinstance(error, UserError)
    assert str(error).splitlines() == [
        "cpu is out of memory: 2.50 GiB could not be allocated",
        "  masters                          4.0 MB",
        "  optimizer state                 8.00 GB",
        "  activations and workspace      996.0 MB",
        "  peak so far                     9.00 GB",
        "what would help:",
        "  rows.micro_size = 8: with fewer rows, activations take less",
        "  rows of 4,096 tokens in [packing]: with shorter ones, activations take less",
        '  s.recompute = "none": with "selective" or "blocks", fewer activations are kept',
        '  dtypes.compute = "float32": with "bfloat16", activations take half',
        "  mesh.data_shard = 1: with more ranks, each holds less of parameters, gradients and moments",
    ]


def test_a_setting_at_its_minimum_is_not_suggested(one_rank: Any) -> None:
    """A single row, and bfloat16, cannot be smaller: masters and optimizer state remain as remedies."""
    message = str(report(one_rank, micro_size=1, compute=torch.bfloat16).on_failure(CUDA))
    assert "micro_size" not in message and ".compute" not in message and 'dtypes.parameter = "float32": with' in message
    narrow = report(one_rank, micro_size=1, compute=torch.bfloat16, parameter=torch.bfloat16, recompute="selective")
    assert str(narrow.on_failure(CUDA)).splitlines()[-3] == "what would help:"


def test_torchs_own_errors_of_the_cpu_are_out_of_memory(one_rank: Any) -> None:
    """An impossible allocation on the CPU raises a recognized error with its size; other errors pass."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**52, dtype=torch.float64)
    assert is_out_of_memory(raised.value) and is_out_of_memory(MemoryError())
    assert "36,028.80 TB could not be allocated" in str(report(one_rank).on_failure(raised.value))
    assert report(one_rank).on_failure(RuntimeError("shapes differ")) is None
