"""Contracts for ports of checkpoints."""

import threading
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from drawloom.graph.testing import expect
from drawloom.graph.types.port_match import implements
from drawloom.ports import AfterRestore, Durable, GrowingState, Parameters, SlicedState, Stateful

LEAVES = torch.Tensor | int | float | str | bool | None


def state_is_a_nested_dict_of_plain_values(node: Stateful) -> None:
    """The state is a nested dict; leaves are tensors, numbers, strings, booleans, None, or lists of such leaves."""
    _expect_plain_values(node.state_dict(), "the state")


def _expect_plain_values(state: Any, where: str) -> None:
    if isinstance(state, dict):
        for name, part in state.items():
            expect(isinstance(name, str), f"{where} has the key {name!r}, which is not a string")
            _expect_plain_values(part, f"{where}, {name}")
    elif isinstance(state, list | tuple):
        expect(all(isinstance(part, LEAVES) for part in state), f"{where} is a list of other than plain values")
    else:
        expect(isinstance(state, LEAVES), f"{where} is a {type(state).__name__}")


def loaded_state_equals_saved_state(saved: Stateful, fresh: Stateful) -> None:
    """A node that has loaded a state from a node with the same settings returns the same state."""
    state = saved.state_dict()
    fresh.load_state_dict(state)
    expect(_are_equal_states(fresh.state_dict(), state), "the loaded state differs from the saved state")


def two_state_dict_calls_return_equal_states(node: Stateful) -> None:
    """Two calls of state_dict in a row return equal states."""
    expect(_are_equal_states(node.state_dict(), node.state_dict()), "state_dict changes the state")


def _are_equal_states(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal_states(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_equal_states, one, other))
    return type(one) is type(other) and bool(one == other)


def forecast_state_has_all_entries_of_the_state(node: GrowingState) -> None:
    """A forecast has all entries in the present state, with the same shapes and dtypes."""
    _expect_entries_in_forecast(node.state_dict(), node.forecast_state_after_first_step(), "the state")


def _expect_entries_in_forecast(state: Any, forecast: Any, where: str) -> None:
    if isinstance(state, dict):
        for name, part in state.items():
            expect(name in forecast, f"{where}, {name} is not in the forecast")
            _expect_entries_in_forecast(part, forecast[name], f"{where}, {name}")
    elif isinstance(state, torch.Tensor):
        expect((state.shape, state.dtype) == (forecast.shape, forecast.dtype), f"{where} was forecast differently")


def state_of_parameters_declares_its_slices(node: Stateful) -> None:
    """
    State tensors with a parameter's name and shape are declared as slices (`SlicedState`): ranks may have other ones.
    """
    kind: Any = type(node)
    values: list[Any] = [getattr(node, field.name) for field in attrs.fields(kind)] if attrs.has(kind) else []
    edges = [value for value in values if implements(value.__class__, Parameters)]
    shapes = {name: param.shape for edge in edges for name, param in edge.named_parameters() if param.ndim}
    if isinstance(node, SlicedState) or not shapes:
        return
    for path, tensor in _iterate_tensors(node.state_dict(), ()):
        name = next((name for name in shapes if name in path and tensor.shape == shapes[name]), None)
        text = f"the state of {name} is sharded like the parameter on several ranks; write the method `state_slices`"
        expect(name is None, f"{text}, which returns `parameter_slices()` by name")


def _iterate_tensors(state: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield a nested state's tensors with their keys."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict):
        for key, part in state.items():
            yield from _iterate_tensors(part, (*path, key))


def loading_another_nodes_state_raises(node: Stateful) -> None:
    """Loading another node's state raises KeyError or ValueError, unless the node has no state."""
    if not node.state_dict():
        return
    try:
        node.load_state_dict({"a state of another node": 1})
    except (KeyError, ValueError):
        return
    expect(False, "a state of another node is loaded without an error")


def flush_works_in_any_thread(durable: Durable) -> None:
    """Flush returns in any thread, even if nothing has been written."""
    errors: list[BaseException] = []

    def flush() -> None:
        try:
            durable.flush()
        except BaseException as error:
            errors.append(error)

    durable.flush()
    thread = threading.Thread(target=flush)
    thread.start()
    thread.join(10)
    expect(not thread.is_alive(), "flush does not return in another thread")
    expect(not errors, f"flush raises {errors[:1]} in another thread")


def after_restore_accepts_a_new_run(node: AfterRestore) -> None:
    """A node accepts the call in a new run, which has nothing to restore."""
    node.after_restore(0)
