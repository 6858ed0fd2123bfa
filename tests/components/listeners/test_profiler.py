"""Profiler traces of chosen steps."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from drawloom.components.listeners import profiler as listener
from drawloom.components.listeners.profiler import Profiler
from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.run import Event, Step
from drawloom.components.ports.stages import Stage, Stages
from drawloom.graph import Every
from drawloom.graph.testing import fake
from support.doubles import Machine
from support.folders import Folder


class Model(nn.Module):
    """A product in the layers 2 and 3."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({number: nn.Linear(3, 3) for number in ("2", "3")})

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


MODEL = Model()


def make_profiler(folder: Path, mesh: Any, **settings: Any) -> Profiler:
    """Return a profiler of the second step, unless settings say otherwise."""
    stages = fake(Stages, local=[Stage(0, 1, LayerRange(2, 4, False, False), MODEL)])
    return Profiler(
        folder=Folder(folder),
        mesh=mesh,
        device=Machine(),
        stages=Every({"stages": stages}),
        **({"wait": 0, "warmup": 1, "active": 1} | settings),
    )


def take(profiler: Profiler, *indices: int) -> None:
    """Take steps with two phases, the first with computations."""
    for index in indices:
        step = Step(index, 99)
        profiler.on_event(Event("step_started", step))
        for phase in ("passes", "update"):
            profiler.on_event(Event("phase_started", step, phase))
            if phase == "passes":
                MODEL(torch.ones(3, 3)).sum().backward()
            profiler.on_event(Event("phase_ended", step, phase))
        profiler.on_event(Event("step_ended", step))


def events(path: Path) -> list[dict[str, Any]]:
    """Return a trace's events, read as strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace_events: list[dict[str, Any]] = json.load(file, parse_constant=refuse)["traceEvents"]
    return trace_events


def spans(trace_events: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return begin and end of the ranges with a name."""
    ranges = [event for event in trace_events if event.get("name") == name and event.get("ph") == "X"]
    return [(event["ts"], event["ts"] + event["dur"]) for event in ranges if event.get("cat") == "user_annotation"]


def test_a_trace_has_ranges_of_steps_phases_and_layers(tmp_path: Path, one_rank: Any) -> None:
    """Only steps after warm-up have ranges, one inside the other, around the layer's operations."""
    profiler = make_profiler(tmp_path, one_rank, active=2)
    take(profiler, 5, 6, 7, 8)
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "steps-6-7-rank-0.json.gz"
    trace_events = events(path)
    assert len(spans(trace_events, "step 6")) == len(spans(trace_events, "step 7")) == 1 and not spans(
        trace_events, "step 5"
    )
    outer = [spans(trace_events, "step 6")[0], spans(trace_events, "passes")[0], spans(trace_events, "layer 2")[0]]
    operations = [
        (event["ts"], event["ts"] + event["dur"]) for event in trace_events if event.get("name") == "aten::addmm"
    ]
    for inner, around in zip([*outer[1:], operations[0]], outer, strict=True):
        assert around[0] <= inner[0] and inner[1] <= around[1]
    assert len(spans(trace_events, "layer 3")) == len(spans(trace_events, "update")) == 2 and len(operations) == 4


def test_cycles_are_repeated_as_often_as_set(tmp_path: Path, one_rank: Any) -> None:
    """Wait, warm up, trace, and again; after the last trace there is no profiler, and no hook on a layer."""
    profiler = make_profiler(tmp_path, one_rank, wait=1, repeat=2)
    take(profiler, *range(1, 10))
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "steps-3-3-rank-0.json.gz",
        "steps-6-6-rank-0.json.gz",
    ]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in MODEL.modules())
    with torch.profiler.profile(acc_events=True) as other:
        torch.ones(1)
    assert other.events()
    (tmp_path / "other").mkdir()
    without_end = make_profiler(tmp_path / "other", one_rank, repeat=0)
    take(without_end, *range(1, 8))
    without_end.close()
    names = sorted(path.name for path in (tmp_path / "other/traces").iterdir())
    assert names == [f"steps-{n}-{n}-rank-0.json.gz" for n in (2, 4, 6)]


def test_memory_is_drawn(tmp_path: Path, one_rank: Any) -> None:
    """Counters for Perfetto are as high as torch's recorded allocations; on a GPU there is a snapshot too."""
    take(make_profiler(tmp_path, one_rank, memory=True), 1, 2)
    trace_events = events(tmp_path / "traces/steps-2-2-rank-0.json.gz")
    counters = [event for event in trace_events if event["ph"] == "C" and event["name"] == "memory of the CPU"]
    single = [event["args"]["Total Allocated"] for event in trace_events if event["name"] == "[memory]"]
    assert single and [event["args"]["Total Allocated"] for event in counters] == single
    assert all({"pid", "ts"} <= event.keys() for event in counters)
    with mock.patch.multiple(
        torch.cuda.memory, _record_memory_history=mock.DEFAULT, _dump_snapshot=mock.DEFAULT
    ) as calls:
        on_gpu = make_profiler(tmp_path, one_rank, memory=True)
        on_gpu.device = Machine(torch.device("cuda"))

        def on_cpu(activities: Any, **others: Any) -> profile:
            return profile(activities=[ProfilerActivity.CPU], **others)

        with mock.patch.object(listener, "profile", on_cpu):
            take(on_gpu, 1, 2)
    calls["_dump_snapshot"].assert_called_once_with(str(tmp_path / "traces/steps-2-2-rank-0.pickle"))
    assert calls["_record_memory_history"].call_args.kwargs == {"enabled": None}


def test_a_profiler_that_fails_is_turned_off(tmp_path: Path, one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With a file in the folder's place: one warning, no error, and no second try."""
    (tmp_path / "traces").write_text("")
    profiler = make_profiler(tmp_path, one_rank, repeat=0)
    take(profiler, *range(1, 7))
    (message,) = caplog.messages
    assert message.startswith("no more traces: the profiler failed at step 2: ")
    assert not any(module._forward_hooks for module in MODEL.modules())


def test_an_unfinished_trace_is_discarded_on_close(tmp_path: Path, one_rank: Any) -> None:
    """A run ending inside the step leaves no trace and no hooks, and torch can profile again."""
    profiler = make_profiler(tmp_path, one_rank)
    take(profiler, 1)
    profiler.on_event(Event("step_started", Step(2, 9)))
    assert MODEL.layers["2"]._forward_hooks
    profiler.close()
    assert not list(tmp_path.iterdir()) and not any(module._forward_hooks for module in MODEL.modules())
    with torch.profiler.profile(acc_events=True) as other:
        torch.ones(1)
    assert other.events()
