"""Tiles of rows that are sorted by expert: none has rows of two."""

import triton
import triton.language as tl

MOST_ROWS = 2**31 - 2**9
"""Rows are numbered in 32 bits, and so are those that the last tile would have if it were full."""


@triton.jit
def rows_of_tile(tile, ends, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile, its first row, and the row at which the expert's end; tiles too many have no expert."""
    each = tl.arange(0, EXPERTS)
    end = tl.load(ends + each, mask=each < experts, other=0)
    begin = tl.load(ends + each - 1, mask=(each > 0) & (each < experts), other=0)
    tiles = tl.where(each < experts, (end - begin + ROWS - 1) // ROWS, 0)
    past = tl.cumsum(tiles, 0)
    expert = tl.sum((past <= tile).to(tl.int32), 0)
    own = each == expert
    first = tl.sum(tl.where(own, begin + (tile - past + tiles) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(own, end, 0), 0)
