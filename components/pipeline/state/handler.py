"""
The state of a pipelined step: written in one view, read in another.

Data comes for the whole batch, a pipeline computes losses by microbatch, and metrics want the whole again. Whoever
writes uses the view that he has, whoever reads the one that he needs, and values are cut or joined on the way.
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

_NOTHING: Any = object()


@attrs.define
class Cell:
    """
    Both forms of a value for `count` microbatches. A read keeps what it made, a write drops what no longer holds.

    Without a specification one is inferred from the form in which the value was written, each time that it is written.
    """

    count: int
    given: SpecTree | None
    _whole: Any = attrs.field(init=False, default=_NOTHING)
    _shards: dict[int, Any] = attrs.field(init=False, factory=dict)
    _inferred: SpecTree | None = attrs.field(init=False, default=None)

    def present(self) -> list[int]:
        """The microbatches whose part can be read."""
        return list(range(self.count)) if self._whole is not _NOTHING else sorted(self._shards)

    def write(self, value: Any) -> None:
        """Replace all of it."""
        self._whole, self._shards, self._inferred = value, {}, None

    def write_shard(self, shard: int, value: Any) -> None:
        """Replace one microbatch's part; the others stay as they are. A ValueError if the whole can't be cut."""
        if self._whole is not _NOTHING:
            self._split()
            self._whole = _NOTHING
        self._shards[shard] = value

    def read(self) -> Any:
        """All of it; a ValueError if the parts don't fit together. Every part must be present."""
        if self._whole is _NOTHING:
            shards = [self._shards[shard] for shard in range(self.count)]
            spec = self.given if self.given is not None else self._inferred
            self._whole = unshard_tree(shards, spec_of_shard(shards[0]) if spec is None else spec)
        return self._whole

    def read_shard(self, shard: int) -> Any:
        """One microbatch's part, which must be present; a ValueError if the whole can't be cut."""
        if shard not in self._shards:
            self._split()
        return self._shards[shard]

    def _split(self) -> None:
        """Make the parts that are not there; from now on they know how they were cut."""
        if len(self._shards) == self.count:
            return
        if self.given is None:
            self._inferred = spec_of_whole(self._whole)
        spec = self._inferred if self.given is None else self.given
        self._shards = dict(enumerate(shard_tree(self._whole, spec, self.count)))


class PipelineStateError(ValueError):
    """A value can't be had in the view in which it is wanted; the text names both."""


class MissingStateError(PipelineStateError, KeyError):
    """A value, or some microbatch's part of it, has not been written."""

    __str__ = ValueError.__str__  # a KeyError would show its text in quotes


class PipelineStateHandler:
    """
    Keeps values by name for one step of `num_shards` microbatches, and hands out views of them.

    `sharding_spec` says for some names how the whole and the parts belong together; for the others that is inferred
    from what is written. Tensors are detached when written; with `copy` they are also copied, then and when they are
    read, so that whoever changes a tensor in place changes no other's.
    """

    def __init__(self, sharding_spec: Mapping[str, SpecTree] | None, num_shards: int, *, copy: bool = False) -> None:
        if num_shards < 1:
            raise PipelineStateError(f"a step has at least one microbatch, not {num_shards}")
        self.num_shards = num_shards
        self._specs = dict(sharding_spec or {})
        self._copy = copy
        self._cells: dict[str, Cell] = {}
        for key, spec in self._specs.items():
            _told(f"the specification of {key!r}", partial(check_spec, spec))

    def global_state(self) -> PipelineState:
        """The view of the whole batch."""
        return _GlobalView(self)

    def sharded_state(self, shard_id: int) -> PipelineState:
        """The view of one microbatch, counted from 0."""
        if not 0 <= shard_id < self.num_shards:
            raise PipelineStateError(f"there is no sharded_state({shard_id}): shards are 0 to {self.num_shards - 1}")
        return _ShardView(self, shard_id)

    def shards_present(self, key: str) -> list[int]:
        """The microbatches in whose view a name can be read; none of a name that nobody wrote."""
        return self._cells[key].present() if key in self._cells else []

    def reset(self) -> None:
        """Forget all values, and what was inferred from them."""
        self._cells = {}

    def _cell(self, key: str) -> Cell:
        return self._cells.setdefault(key, Cell(self.num_shards, self._specs.get(key)))

    def _need(self, key: str, shards: Sequence[int], place: str) -> None:
        """Raise an error that says which of these parts of a value are not there."""
        present = self.shards_present(key)
        missing = [str(shard) for shard in shards if shard not in present]
        if not present:
            raise MissingStateError(f"{place} is not there: nobody wrote it in this step")
        if missing:
            which = f"shard {missing[0]} was" if len(missing) == 1 else f"shards {', '.join(missing)} were"
            raise MissingStateError(f"{place} is not there: of {self.num_shards} shards, {which} not written")

    def _taken(self, value: Any) -> Any:
        """A value as it is kept, and as it is handed out: in nodes of its own, whose change changes nothing here."""
        return transform(self._tensor, value)

    def _tensor(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone() if self._copy else leaf.detach()


@attrs.frozen
class _GlobalView:
    _handler: PipelineStateHandler

    def __getitem__(self, key: str) -> Any:
        self._handler._need(key, range(self._handler.num_shards), self._place(key))
        return self._handler._taken(_told(self._place(key), self._handler._cells[key].read))

    def __setitem__(self, key: str, value: Any) -> None:
        self._handler._cell(key).write(self._handler._taken(value))

    def __contains__(self, key: str) -> bool:
        return len(self._handler.shards_present(key)) == self._handler.num_shards

    def _place(self, key: str) -> str:
        return f"global_state()[{key!r}]"


@attrs.frozen
class _ShardView:
    _handler: PipelineStateHandler
    _shard: int

    def __getitem__(self, key: str) -> Any:
        self._handler._need(key, [self._shard], self._place(key))
        part = _told(self._place(key), partial(self._handler._cells[key].read_shard, self._shard))
        return self._handler._taken(part)

    def __setitem__(self, key: str, value: Any) -> None:
        write = partial(self._handler._cell(key).write_shard, self._shard, self._handler._taken(value))
        _told(self._place(key), write)

    def __contains__(self, key: str) -> bool:
        return self._shard in self._handler.shards_present(key)

    def _place(self, key: str) -> str:
        return f"sharded_state({self._shard})[{key!r}]"


def _told(place: str, work: Callable[[], Any]) -> Any:
    """What `work` gives; a ValueError says where."""
    try:
        return work()
    except ValueError as error:
        raise PipelineStateError(f"{place}: {error}") from error
