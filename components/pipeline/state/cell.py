"""One named value of a step, as it was written and as it was read: whole, by microbatch, or both."""

from typing import Any

import attrs

from drawloom.components.pipeline.state.inference import spec_of_shard, spec_of_whole
from drawloom.components.pipeline.state.sharding import shard_tree, unshard_tree
from drawloom.components.ports.pipeline_state import SpecTree

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
