"""
The state of a pipelined step: values are written in one view and read in another.

Data comes for the whole batch, a pipeline computes losses by microbatch, and metrics need the whole batch again. Values
are sharded or joined when they are read in the other view.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
from torch import Tensor

from drawloom.components.pipeline.state.sharding import (
    check_spec,
    shard_tree,
    spec_of_shard,
    spec_of_whole,
    unshard_tree,
)
from drawloom.components.ports.pipeline import PipelineState, SpecTree
from drawloom.components.storage.pytree import transform

_UNSET: Any = object()


@attrs.define
class Cell:
    """
    A value as a whole and as shards of `count` microbatches. A read caches the other form, a write invalidates it.

    Without a sharding spec, one is inferred from the form that was written, at each write.
    """

    count: int
    spec: SpecTree | None
    _whole: Any = attrs.field(init=False, default=_UNSET)
    _shards: dict[int, Any] = attrs.field(init=False, factory=dict)
    _inferred: SpecTree | None = attrs.field(init=False, default=None)

    def present(self) -> list[int]:
        """The microbatches whose shard can be read."""
        return list(range(self.count)) if self._whole is not _UNSET else sorted(self._shards)

    def write(self, value: Any) -> None:
        """Replace the whole value."""
        self._whole, self._shards, self._inferred = value, {}, None

    def write_shard(self, shard: int, value: Any) -> None:
        """Replace one microbatch's shard; the others keep theirs. ValueError if the whole can't be sharded."""
        if self._whole is not _UNSET:
            # The other shards must survive, so the whole is sharded before it is invalidated.
            self._split()
            self._whole = _UNSET
        self._shards[shard] = value

    def read(self) -> Any:
        """The whole value; every shard must be present. ValueError if the shards don't fit together."""
        if self._whole is _UNSET:
            shards = [self._shards[shard] for shard in range(self.count)]
            spec = self.spec if self.spec is not None else self._inferred
            self._whole = unshard_tree(shards, spec_of_shard(shards[0]) if spec is None else spec)
        return self._whole

    def read_shard(self, shard: int) -> Any:
        """One microbatch's shard, which must be present; ValueError if the whole can't be sharded."""
        if shard not in self._shards:
            self._split()
        return self._shards[shard]

    def _split(self) -> None:
        """Shard the whole value, and keep the spec by which it was sharded."""
        if len(self._shards) == self.count:
            return
        if self.spec is None:
            self._inferred = spec_of_whole(self._whole)
        spec = self._inferred if self.spec is None else self.spec
        self._shards = dict(enumerate(shard_tree(self._whole, spec, self.count)))


class PipelineStateError(ValueError):
    """A value can't be converted to the view in which it is read; the message names both."""


class MissingStateError(PipelineStateError, KeyError):
    """A value, or some microbatch's shard of it, has not been written."""

    __str__ = ValueError.__str__  # a KeyError would show its text in quotes


class PipelineStateHandler:
    """
    Holds values by name for one step of `num_shards` microbatches, and gives views of them.

    `sharding_spec` maps names to sharding specs; for other names they are inferred from what is written. Tensors are
    detached when written; with `copy` they are also copied, when written and when read, so that a change in place
    affects no other reader.
    """

    def __init__(self, sharding_spec: Mapping[str, SpecTree] | None, num_shards: int, *, copy: bool = False) -> None:
        if num_shards < 1:
            raise PipelineStateError(f"a step has at least one microbatch, not {num_shards}")
        self.num_shards = num_shards
        self._specs = dict(sharding_spec or {})
        self._copy = copy
        self._cells: dict[str, Cell] = {}
        for key, spec in self._specs.items():
            _with_location(f"the specification of {key!r}", partial(check_spec, spec))

    def global_state(self) -> PipelineState:
        """The view of the whole batch."""
        return _GlobalView(self)

    def sharded_state(self, shard_id: int) -> PipelineState:
        """The view of one microbatch, counted from 0."""
        if not 0 <= shard_id < self.num_shards:
            raise PipelineStateError(f"there is no sharded_state({shard_id}): shards are 0 to {self.num_shards - 1}")
        return _ShardView(self, shard_id)

    def shards_present(self, key: str) -> list[int]:
        """The microbatches in whose view a name can be read; none for a name that has not been written."""
        return self._cells[key].present() if key in self._cells else []

    def reset(self) -> None:
        """Drop all values and inferred specs."""
        self._cells = {}

    def _cell(self, key: str) -> Cell:
        return self._cells.setdefault(key, Cell(self.num_shards, self._specs.get(key)))

    def _require_present(self, key: str, shards: Sequence[int], location: str) -> None:
        """Raise MissingStateError if any of these shards of a value is missing."""
        present = self.shards_present(key)
        missing = [str(shard) for shard in shards if shard not in present]
        if not present:
            raise MissingStateError(f"{location} is missing: it has not been written in this step")
        if missing:
            which = f"shard {missing[0]} was" if len(missing) == 1 else f"shards {', '.join(missing)} were"
            raise MissingStateError(f"{location} is missing: of {self.num_shards} shards, {which} not written")

    def _detached(self, value: Any) -> Any:
        """A value as it is stored and returned: with containers of its own, so that changing one affects no other."""
        return transform(self._detach_leaf, value)

    def _detach_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone() if self._copy else leaf.detach()


@attrs.frozen
class _GlobalView:
    _handler: PipelineStateHandler

    def __getitem__(self, key: str) -> Any:
        self._handler._require_present(key, range(self._handler.num_shards), self._location(key))
        return self._handler._detached(_with_location(self._location(key), self._handler._cells[key].read))

    def __setitem__(self, key: str, value: Any) -> None:
        self._handler._cell(key).write(self._handler._detached(value))

    def __contains__(self, key: str) -> bool:
        return len(self._handler.shards_present(key)) == self._handler.num_shards

    def _location(self, key: str) -> str:
        return f"global_state()[{key!r}]"


@attrs.frozen
class _ShardView:
    _handler: PipelineStateHandler
    _shard: int

    def __getitem__(self, key: str) -> Any:
        self._handler._require_present(key, [self._shard], self._location(key))
        part = _with_location(self._location(key), partial(self._handler._cells[key].read_shard, self._shard))
        return self._handler._detached(part)

    def __setitem__(self, key: str, value: Any) -> None:
        write = partial(self._handler._cell(key).write_shard, self._shard, self._handler._detached(value))
        _with_location(self._location(key), write)

    def __contains__(self, key: str) -> bool:
        return self._shard in self._handler.shards_present(key)

    def _location(self, key: str) -> str:
        return f"sharded_state({self._shard})[{key!r}]"


def _with_location(location: str, work: Callable[[], Any]) -> Any:
    """The result of `work`; a ValueError gets the location in its message."""
    try:
        return work()
    except ValueError as error:
        raise PipelineStateError(f"{location}: {error}") from error
