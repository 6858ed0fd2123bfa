"""Slices of parameters and the keys of their noise."""

from drawloom.components.optim.torch_optimizer import LocalShard, shard_of
from drawloom.components.ports.slices import TensorSlice


def test_slices_that_are_no_contiguous_range_are_identified_by_their_offset() -> None:
    """Rows are a contiguous range and columns are not; a range that begins inside of a draw has an offset, too."""

    def part(offsets: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...] = (6, 10)) -> LocalShard:
        return shard_of(TensorSlice(shape, offsets, size), 2)

    assert shard_of(None, 2) == LocalShard()
    assert part((0, 0), (6, 10)) == LocalShard()
    assert part((3, 0), (3, 10)) == LocalShard(30)
    assert part((0, 0), (3, 10)) == LocalShard(0)
    assert part((0, 5), (6, 5)) == LocalShard(offset=(0, 5))
    assert part((3, 0), (3, 5)) == LocalShard(offset=(3, 0))
    assert part((4, 4), (1, 2)) == LocalShard(44)
    assert part((3,), (3,), (6,)) == LocalShard(offset=(3,))


def test_only_contiguous_ranges_share_the_key() -> None:
    """Contiguous ranges have the whole parameter's key, other slices have keys of their own."""
    keys = {shard.key(1, "noise", "w") for shard in (LocalShard(), LocalShard(8), LocalShard(offset=(0, 5)))}
    assert len(keys) == 2
    assert LocalShard().key(1, "noise", "w") != LocalShard().key(2, "noise", "w")
