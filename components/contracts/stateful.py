"""What everything with state does."""

from typing import Any

import torch

from drawloom.components.ports.run import Stateful
from drawloom.graph.testing import expect

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
