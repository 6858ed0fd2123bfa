"""Contract for the port of staging."""

import threading
from concurrent.futures import Future
from typing import Any

import torch

from drawloom.components.ports.staging import Stager
from drawloom.graph.testing import expect


def _make_state(value: float) -> dict[str, Any]:
    whole = torch.full((4, 6), value)
    # a view and its base, like a tied or sharded parameter
    return {"whole": whole, "nested": {"view": whole[1:, ::2], "step": 3, "name": "a", "none": None, "list": [1, 2]}}


def _stage_and_wait(stager: Stager, state: dict[str, Any]) -> dict[str, Any]:
    result = stager.stage(state)
    copied = result.result(60) if isinstance(result, Future) else result
    stager.synchronize_staging()
    return copied


def _expect_state_filled_with(copied: dict[str, Any], value: float, when: str) -> None:
    state = _make_state(value)
    for copy, tensor in ((copied["whole"], state["whole"]), (copied["nested"]["view"], state["nested"]["view"])):
        expect(copy.shape == tensor.shape, f"{when}, a tensor has the shape {tuple(copy.shape)}")
        expect(bool((copy == tensor).all()), f"{when}, a tensor has other values than the state had")
    for name in ("step", "name", "none", "list"):
        leaf = copied["nested"][name]
        expect(leaf == state["nested"][name], f"{when}, {name} is {leaf!r}")


def the_staged_copy_equals_the_state(stager: Stager) -> None:
    """A staged copy has the structure, shapes and values of the state."""
    _expect_state_filled_with(_stage_and_wait(stager, _make_state(1.0)), 1.0, "staged")


def the_state_may_change_after_staging(stager: Stager) -> None:
    """If the stager copies, a change of the state after `synchronize_staging` does not change the copy."""
    state = _make_state(1.0)
    copied = _stage_and_wait(stager, state)
    state["whole"].fill_(2.0)
    _expect_state_filled_with(copied, 1.0 if stager.makes_copies else 2.0, "after a change of the state")


def a_copy_in_use_is_not_overwritten(stager: Stager) -> None:
    """Later copies do not reuse the memory of a copy while any of its tensors is alive."""
    states = [_make_state(float(number)) for number in range(3)]
    copies = [_stage_and_wait(stager, state) for state in states]
    for number, copied in enumerate(copies):
        _expect_state_filled_with(copied, float(number), "after later copies")


def staging_an_uncopyable_value_raises_type_error(stager: Stager) -> None:
    """Staging a lock, which can't be copied, raises TypeError, unless the stager copies nothing."""
    if not stager.makes_copies:
        return
    try:
        _stage_and_wait(stager, {"a": {"lock": threading.Lock()}})
    except TypeError:
        return
    expect(False, "a lock in the state raises no TypeError")
