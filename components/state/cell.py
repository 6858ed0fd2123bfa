"""One value of a step, as a whole and by microbatch."""

from typing import Any

import attrs

from drawloom.components.state.sharding import shard_tree, spec_of_shard, spec_of_whole, unshard_tree
from drawloom.components.state.specs import SpecTree

_UNSET: Any = object()


@attrs.define
class Cell:
    """
    One value as a whole and as shards of `count` microbatches. A read caches the other form, a write invalidates it.

    Without a sharding spec, one is inferred from the form that was written, at each write.
    """

    count: int
    spec: SpecTree | None
    is_global: bool = attrs.field(init=False, default=False)
    _whole: Any = attrs.field(init=False, default=_UNSET)
    _shards: dict[int, Any] = attrs.field(init=False, factory=dict)
    _inferred: SpecTree | None = attrs.field(init=False, default=None)

    def present(self) -> list[int]:
        """Return the microbatches whose shard can be read."""
        return list(range(self.count)) if self._whole is not _UNSET else sorted(self._shards)

    @property
    def is_whole(self) -> bool:
        """Whether the whole value can be read."""
        return self._whole is not _UNSET or 0 < self.count == len(self._shards)

    def write(self, value: Any) -> None:
        """Replace the whole value."""
        self.is_global, self._whole, self._shards, self._inferred = True, value, {}, None

    def write_shard(self, shard: int, value: Any) -> None:
        """Replace one microbatch's shard; the others keep theirs. Raises ValueError if the whole cannot be sharded."""
        if self._whole is not _UNSET:
            # The other shards must survive, so the whole is sharded before it is invalidated.
            self._split()
            self._whole = _UNSET
        self.is_global = False
        self._shards[shard] = value

    def read(self) -> Any:
        """Return the whole value; every shard must be present. Raises ValueError if the shards do not fit together."""
        if self._whole is _UNSET:
            shards = [self._shards[shard] for shard in range(self.count)]
            spec = self.spec if self.spec is not None else self._inferred
            self._whole = unshard_tree(shards, spec_of_shard(shards[0]) if spec is None else spec)
        return self._whole

    def read_shard(self, shard: int) -> Any:
        """Return one microbatch's shard, which must be present. Raises ValueError if the whole cannot be sharded."""
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
