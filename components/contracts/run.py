"""Contracts of the ports of a run: what phases, listeners, metrics and trackers are handed, and what they do."""

import math
import typing
from pathlib import Path
from typing import Any

import torch

from drawloom.components.ports.run import (
    Batching,
    Event,
    EventKind,
    Listener,
    Metric,
    Randomness,
    RunFolder,
    RunInfo,
    Stateful,
    Step,
    Stop,
    Tracker,
    Value,
)
from drawloom.graph.testing import expect


def sizes_multiply(batching: Batching) -> None:
    """Microbatches of all replicas make exactly the rows of a step."""
    rows = batching.microbatches * batching.micro_size * batching.dp_size
    expect(rows == batching.global_size, f"{rows} rows make a step of {batching.global_size}")
    expect(0 <= batching.dp_rank < batching.dp_size, f"replica {batching.dp_rank} is none of {batching.dp_size}")


def every_place_is_taken_once(batching: Batching) -> None:
    """The places of a replica lie in the step's part of the endless order, and no step takes one again."""
    seen: set[int] = set()
    for step in (1, 2, 3):
        microbatches = batching.positions(step)
        places = [place for microbatch in microbatches for place in microbatch]
        sizes = {len(microbatch) for microbatch in microbatches}
        expect(
            sizes == {batching.micro_size} and len(microbatches) == batching.microbatches, "a step has another shape"
        )
        inside = range((step - 1) * batching.global_size, step * batching.global_size)
        expect(all(place in inside for place in places), f"step {step} takes places of another")
        expect(len(set(places)) == len(places) and not seen & set(places), f"step {step} takes a place twice")
        seen |= set(places)


def it_hears_of_everything(listener: Listener) -> None:
    """A whole run of two steps is heard without a word."""
    listener.on_event(Event("run_started"))
    for index in (1, 2):
        step = Step(index, 2, tokens=64, outputs={"loss": 1.5, "grad_norm": 1.0, "lr": 0.1})
        for moment in ("step_started", "phase_started", "phase_ended", "saving_started", "saving_ended", "step_ended"):
            listener.on_event(Event(moment, step, "optimizer" if moment.startswith("phase") else ""))
    listener.on_event(Event("run_ended"))


def it_bears_what_it_does_not_expect(listener: Listener) -> None:
    """Each moment alone, out of order and before any step, is heard without a word."""
    for moment in reversed(typing.get_args(EventKind)):
        listener.on_event(Event(moment, Step(1, 1), "optimizer"))


def _step(index: int) -> Step:
    values = {"loss": torch.tensor(2.0), "grad_norm": torch.tensor(1.0), "lr": 0.1}
    return Step(index, 10, tokens=64, outputs=values)


def _measured(metric: Metric, step: Step) -> typing.Mapping[str, Value]:
    """What a metric says of a step if this is the only rank."""
    given = metric.update(step)
    for name, part in given.items():
        expect(name in metric.accumulators, f"{name!r} is none of its accumulators")
        shape = metric.accumulators[name].shape
        expect(tuple(part.shape) == shape, f"{name} has shape {tuple(part.shape)}, and {shape} was declared")
    totals = {name: given.get(name, each.identity()).double().cpu() for name, each in metric.accumulators.items()}
    return metric.compute(totals, step)


def it_measures_numbers(metric: Metric) -> None:
    """Each value is a finite number, a boolean, or nothing, under the name of a text."""
    for index in (1, 2, 3):
        for name, value in _measured(metric, _step(index)).items():
            expect(isinstance(name, str) and name, f"{name!r} is no name")
            expect(value is None or isinstance(value, int | float), f"{name} is {value!r}")
            expect(value is None or math.isfinite(value), f"{name} is {value}")


def names_stay_the_same(metric: Metric) -> None:
    """Every step is measured under the same names, so that a series has no holes."""
    names = [sorted(_measured(metric, _step(index))) for index in (1, 2, 3)]
    expect(names[0] == names[1] == names[2], f"the names change from step to step: {names}")


def it_changes_nothing(metric: Metric) -> None:
    """A step is as it was after it has been measured."""
    step = _step(1)
    before = dict(step.outputs)
    _measured(metric, step)
    same = step.outputs.keys() == before.keys() and all(step.outputs[key] is before[key] for key in before)
    expect(same and (step.index, step.tokens, step.skip_reason) == (1, 64, ""), "measuring changed the step")


def _draw(randomness: Randomness, *purpose: str | int) -> list[float]:
    return torch.rand(4, generator=randomness.stream(*purpose)).tolist()


def it_follows_from_the_purpose(one: Randomness, other: Randomness) -> None:
    """The same purpose draws the same, whatever was drawn before."""
    first = _draw(one, "dropout", 3)
    _draw(other, "something else")
    torch.rand(7)
    expect(
        _draw(other, "dropout", 3) == first == _draw(one, "dropout", 3), "what was drawn before changes what is drawn"
    )


def purposes_differ(randomness: Randomness) -> None:
    """Other purposes draw otherwise, also those that look alike."""
    purposes: list[tuple[str | int, ...]] = [("a",), ("b",), ("a", 1), ("a", 2), ("a", "1"), ("a1",), (1, "a")]
    draws = [tuple(_draw(randomness, *purpose)) for purpose in purposes]
    expect(len(set(draws)) == len(draws), "two purposes draw the same")


def it_can_be_written_into(folder: RunFolder) -> None:
    """It is there, and a file can be written in it."""
    expect(folder.folder.is_dir(), f"{folder.folder} is no folder")
    probe = folder.folder / "written by a contract"
    probe.write_text("x", "utf-8")
    probe.unlink()


def it_is_known(job: RunInfo) -> None:
    """It has a name, a seed and a folder, and they do not change."""
    expect(isinstance(job.name, str) and job.name, "it has no name")
    expect(isinstance(job.seed, int) and isinstance(job.path, Path), "it has no seed, or no folder")
    expect((job.name, job.seed, job.path) == (job.name, job.seed, job.path), "it changes")


LEAVES = torch.Tensor | int | float | str | bool | None


def state_is_plain(node: Stateful) -> None:
    """State is made of tables with names, and at the leaves tensors, numbers, texts, booleans, nothing, or lists."""
    _expect_plain(node.state_dict(), "the state")


def _expect_plain(state: Any, where: str) -> None:
    if isinstance(state, dict):
        for name, part in state.items():
            expect(isinstance(name, str), f"{where} has the key {name!r}, which is no text")
            _expect_plain(part, f"{where}, {name}")
    elif isinstance(state, list | tuple):
        expect(all(isinstance(part, LEAVES) for part in state), f"{where} is a list of more than plain values")
    else:
        expect(isinstance(state, LEAVES), f"{where} is a {type(state).__name__}")


def state_comes_back(saved: Stateful, fresh: Stateful) -> None:
    """Another that is made alike, and loads a state, has that state."""
    state = saved.state_dict()
    fresh.load_state_dict(state)
    expect(_same(fresh.state_dict(), state), "the state that was loaded is another than the one that was saved")


def a_state_is_no_view(node: Stateful) -> None:
    """Asking for the state twice gives the same, if nothing happened in between."""
    expect(_same(node.state_dict(), node.state_dict()), "the state changes as it is asked for")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def what_does_not_fit_is_told(node: Stateful) -> None:
    """A state of something else is refused with a KeyError or ValueError, unless there is no state at all."""
    if not node.state_dict():
        return
    try:
        node.load_state_dict({"a state of something else": 1})
    except (KeyError, ValueError):
        return
    expect(False, "a state of something else is loaded without a word")


def nobody_asks_by_himself(stop: Stop) -> None:
    """Without a signal the run goes on."""
    expect([stop.agreed(), stop.agreed()] == [0, 0], "somebody asks for the end of the run")


def it_takes_all_that_is_measured(tracker: Tracker) -> None:
    """Numbers, booleans and nothing are taken, and names with dots and slashes."""
    tracker.track(1, {"loss": 1.5, "skipped": False, "validation_loss": None, "memory/peak.bytes": 3})
    tracker.track(2, {})


def it_goes_back(tracker: Tracker) -> None:
    """What was written after a step can be forgotten and written again, also when nothing was written after it."""
    for step in (1, 2, 3):
        tracker.track(step, {"loss": float(step)})
    tracker.rewind(1)
    tracker.rewind(1)
    for step in (2, 3):
        tracker.track(step, {"loss": float(-step)})
    tracker.rewind(0)
    tracker.track(1, {"loss": 0.0})
