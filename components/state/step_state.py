"""
The state of a training step: the only home of its values.

Values are written and read by name, in the global view (the whole step) or in the sharded view of one microbatch. A
pipeline computes losses by microbatch, and metrics need them for the step: a value written in one view is converted
when it is read in the other, by a sharding spec that is given or inferred.

Numbers stay tensors on the device that computes them. One asynchronous copy for each step brings them to the host.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import attrs
import torch
from torch import Tensor

from drawloom.components.state.trees import ChooseSpec, Spec, list_leaves, map_leaves

if TYPE_CHECKING:
    from drawloom.components.state.host_copy import HostCopy


class PipelineStateError(ValueError):
    """A value cannot be converted to the view in which it is read; the message names both."""


class MissingStateError(PipelineStateError, KeyError):
    """The value `key`, or its shard of some microbatch, has not been written."""

    __str__ = ValueError.__str__  # a KeyError would show its text in quotes

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


class StepState:
    """
    Values of one step by name. The object itself is the global view, `microbatch(i)` the sharded view of microbatch i.

        state = StepState({"batches": [first, second]}, microbatches=2, specs={"batches": "stack"})
        state.microbatch(0)["loss"], state.microbatch(1)["loss"] = torch.tensor(1.0), torch.tensor(2.0)
        state["loss"]  # tensor([1., 2.])

    Tensors are detached from their autograd graph when they are written. Values are shared, not copied: a reader does
    not change them in place. A value that is read in the other view is converted once, until it is written again.

    A name is in a view if it can be read there. Reading a missing value raises MissingStateError; a value that cannot
    be converted to the view raises PipelineStateError.
    """

    late_devices: ClassVar[tuple[str, ...]] = ("cuda",)
    """Types of devices for whose tensors the host has to wait."""

    def __init__(
        self, values: Mapping[str, Any] | None = None, *, microbatches: int = 1, specs: Mapping[str, Spec] | None = None
    ) -> None:
        self._copies: list[tuple[list[Tensor], HostCopy]] = []
        self._read: dict[int, float] = {}
        self.clear_for_new_step(microbatches, specs or {})
        for name, value in (values or {}).items():
            self[name] = value

    def clear_for_new_step(self, microbatches: int, specs: Mapping[str, Spec]) -> None:
        """
        Begin a step: drop all values, and set the microbatch count and the specs to shard and join values.

        Specs of other names are inferred. Raises PipelineStateError for a negative number or an unknown spec.
        """
        if microbatches < 0:
            raise PipelineStateError(f"a step has at least 0 microbatches, not {microbatches}")
        for key, spec in specs.items():
            if spec not in get_args(Spec):
                raise PipelineStateError(f"the specification of {key!r} is {spec!r}; write one of {get_args(Spec)}")
        self.microbatches, self._specs = microbatches, dict(specs)
        self._copies, self._read = [], {}
        self._written: dict[str, Any] = {}  # by name, values that were written in the global view
        self._joined: dict[str, Any] = {}  # values that were joined from the shards of all microbatches
        self._shards: dict[str, dict[int, Any]] = {}  # by microbatch, shards that were written or split off
        self._split: set[str] = set()  # names of values that were split off by an inferred spec

    def microbatch(self, index: int) -> "MicrobatchView":
        """Return the sharded view of one microbatch, counted from 0."""
        if not 0 <= index < self.microbatches:
            raise PipelineStateError(f"there is no microbatch({index}): microbatches are 0 to {self.microbatches - 1}")
        return MicrobatchView(self, index)

    def __getitem__(self, key: str) -> Any:
        if key in self._written:
            return self._written[key]
        if key not in self._joined:
            self._joined[key] = self._join_shards(key)
        return self._joined[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._written[key] = _detach(value)
        self._joined.pop(key, None)
        self._shards.pop(key, None)
        self._split.discard(key)

    def drop(self, key: str) -> None:
        """Remove a value from all views, if it was written."""
        for values in (self._written, self._joined, self._shards):
            values.pop(key, None)
        self._split.discard(key)

    def __contains__(self, key: str) -> bool:
        return key in self._written or 0 < self.microbatches == len(self._shards.get(key, ()))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names that the global view contains."""
        return (key for key in {**self._written, **self._shards} if key in self)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the global view, or the default if the view does not contain it."""
        return self[key] if key in self else default  # noqa: SIM401 - this is `get`

    def microbatches_present(self, key: str) -> list[int]:
        """Return the microbatches, counted from 0, with a written value; [] if it was never written."""
        return [*range(self.microbatches)] if key in self._written else sorted(self._shards.get(key, ()))

    def start_host_copy(self, tensors: Mapping[str, Tensor]) -> "HostCopy":
        """Start to copy tensors (numbers,) to the host."""
        from drawloom.components.state.host_copy import HostCopy

        return HostCopy.start(tensors)

    def start_copying_to_host(self) -> None:
        """
        Start to copy the tensors that were written in the global view to the host; does not wait.

        Tensors that were copied before are not copied again. Tensors on the CPU are not copied.
        """
        known = {id(tensor) for tensors, _ in self._copies for tensor in tensors}
        tensors = [tensor for tensor in self._iterate_tensors_on_device() if id(tensor) not in known]
        if tensors:
            flat = {
                str(dtype): torch.cat([tensor.reshape(-1) for tensor in tensors if tensor.dtype == dtype])
                for dtype in dict.fromkeys(tensor.dtype for tensor in tensors)
            }
            self._copies.append((tensors, self.start_host_copy(flat)))

    @property
    def is_on_host(self) -> bool:
        """Return whether the host can read all values of the global view without waiting for a device."""
        arrived = {id(tensor) for tensors, copy in self._copies if copy.has_arrived for tensor in tensors}
        return all(id(tensor) in arrived for tensor in self._iterate_tensors_on_device())

    def read_on_host(self, key: str) -> Any:
        """Return a value of the global view with its tensors on the CPU; waits for their copy. Any thread may call."""
        self.start_copying_to_host()
        copies = dict(self._iterate_finished_host_copies())
        return map_leaves(lambda leaf: copies.get(id(leaf), leaf), self[key])

    def number(self, key: str) -> float:
        """Return a number of the global view; waits for its copy to the host. Raises MissingStateError."""
        value = self[key]
        if not isinstance(value, Tensor) or value.device.type not in self.late_devices:
            return float(value)
        if id(value) not in self._read:  # the state keeps every tensor that was copied, so that ids are unique
            self._read[id(value)] = float(self.read_on_host(key))
        return self._read[id(value)]

    def numbers(self) -> dict[str, float]:
        """Return the numbers written in the global view by name: floats, and float tensors without dimensions."""
        names = [
            key
            for key, value in self._written.items()
            if type(value) is float or (isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point())
        ]
        return {key: self.number(key) for key in names}

    def _iterate_tensors_on_device(self) -> Iterator[Tensor]:
        """Yield the tensors written in the global view that are not on the CPU."""
        for value in self._written.values():
            tensors = (leaf for leaf in list_leaves(value) if isinstance(leaf, Tensor))
            yield from (tensor for tensor in tensors if tensor.device.type in self.late_devices)

    def _iterate_finished_host_copies(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the id of every tensor that was copied, with its copy; waits for the copies."""
        for tensors, copy in self._copies:
            rest = dict(copy.read())
            for tensor in tensors:
                name = str(tensor.dtype)
                part, rest[name] = rest[name][: tensor.numel()], rest[name][tensor.numel() :]
                yield id(tensor), part.view(tensor.shape)

    def _join_shards(self, key: str) -> Any:
        """Join a value from all microbatches' shards; MissingStateError if one is missing."""
        if key not in self:
            raise self._create_missing_error(key, range(self.microbatches), f"[{key!r}]")
        from drawloom.components.state import sharding  # a check needs no values

        shards = [self._shards[key][index] for index in range(self.microbatches)]
        infer = sharding.choose_spec_of_whole_leaf if key in self._split else sharding.choose_spec_of_shard_leaf
        return _call_with_error_location(
            f"[{key!r}]", partial(sharding.unshard_tree, shards, self._choose_spec(key, infer))
        )

    def _get_or_split_shards(self, key: str, index: int) -> dict[int, Any]:
        """Return a present value's shards, for an access by microbatch `index`; a global value is sharded first."""
        if key not in self._shards:
            from drawloom.components.state import sharding

            choose_spec = self._choose_spec(key, sharding.choose_spec_of_whole_leaf)
            split = partial(sharding.shard_tree, self._written[key], choose_spec, self.microbatches)
            shards = _call_with_error_location(_describe_location(key, index), split)
            self._shards[key] = dict(enumerate(shards))
            self._split.add(key)
        return self._shards[key]

    def _choose_spec(self, key: str, infer: ChooseSpec) -> ChooseSpec:
        """Return the function to choose the specs of a value's leaves: its given spec, or `infer`."""
        spec = self._specs.get(key)
        return infer if spec is None else lambda _leaf: spec

    def _create_missing_error(self, key: str, shards: Sequence[int], location: str) -> MissingStateError:
        """Return an error naming the `shards`, as microbatch numbers, not written for a value."""
        present = self.microbatches_present(key)
        missing = [str(shard) for shard in shards if shard not in present]
        if not present:
            return MissingStateError(f"{location} is missing: it has not been written in this step", key)
        which = f"microbatch {missing[0]} was" if len(missing) == 1 else f"microbatches {', '.join(missing)} were"
        text = f"{location} is missing: of {self.microbatches} microbatches, {which} not written"
        return MissingStateError(text, key)


@attrs.frozen
class MicrobatchView:
    """Sharded view of one microbatch, which reads and writes its shards in the state."""

    _state: StepState
    _index: int

    def __getitem__(self, key: str) -> Any:
        state, index = self._state, self._index
        if key not in self:
            raise state._create_missing_error(key, [index], _describe_location(key, index))
        return state._get_or_split_shards(key, index)[index]

    def __setitem__(self, key: str, value: Any) -> None:
        state = self._state
        if key in state._written:
            state._get_or_split_shards(key, self._index)  # before the whole value is dropped
            del state._written[key]
        state._joined.pop(key, None)
        state._shards.setdefault(key, {})[self._index] = _detach(value)

    def __contains__(self, key: str) -> bool:
        return self._index in self._state.microbatches_present(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is `get`


def _describe_location(key: str, index: int) -> str:
    return f"microbatch({index})[{key!r}]"


def _detach(value: Any) -> Any:
    """Return a value without autograd graphs: the same object if it has none."""
    if isinstance(value, Tensor | float):  # most values of a step
        return value.detach() if isinstance(value, Tensor) and value.requires_grad else value
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in list_leaves(value)):
        return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)
    return value


def _call_with_error_location(location: str, work: Callable[[], Any]) -> Any:
    """Return the result of `work`; a ValueError becomes a PipelineStateError with the location."""
    try:
        return work()
    except ValueError as error:
        raise PipelineStateError(f"{location}: {error}") from error
