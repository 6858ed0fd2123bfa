"""
Chunks with 64 tokens of recurrences over documents: their tiles, systems and sizes.

Tensors are (rows, length, heads, width), and states (rows, chunks, heads, K, V). Heads follow each other in memory:
neighbouring programs have neighbouring heads, and read long pieces.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from drawloom.kernels.triton.primitives import (
    cache_launches,
    cdiv,
    get_dot_precision,
    limit_registers,
    load_or_zero,
    mask_tile,
    next_power_of_2,
    sm_count,
)

CHUNK_SIZE = 64
"""Tokens in a chunk."""

CHUNK = constexpr(CHUNK_SIZE)

MIN_BLOCK = 64
"""
Channels in the smallest tile. With 16, an H200 computed wrong results from the second chunk on, and products with
32 columns on eight warps read outside shared memory (Triton 3.6).
"""

MIN_GATE = constexpr(-40.0)
"""exp(-40) is 0 beside anything in float32, and sums with lower gates would lose digits."""


@triton.jit
def locate_chunk_and_head(program, length, chunks, HEADS: constexpr):
    """
    Return the chunk's number among all rows' chunks, the head, the row, the chunk, and its tokens.

    Tokens are the first one's number among all rows, their indices in the chunk, and whether they exist. A head's
    tokens are these, the head, and the number of heads.
    """
    number, head = program // HEADS, program % HEADS
    row, chunk = number // chunks, number % chunks
    return number, head, row, chunk, locate_tokens(row, chunk, length)


@triton.jit
def locate_tokens(row, chunk, length, SIZE: constexpr = CHUNK_SIZE):
    """Return a chunk's tokens, as `locate_chunk_and_head` does."""
    first, token = row.to(tl.int64) * length + chunk * SIZE, tl.arange(0, SIZE)
    return first, token, chunk * SIZE + token < length


@triton.jit
def load_chunk_document_ids(ids, before, row, chunk, tokens, length):
    """Return documents by token, for the incoming state and for the last token, and the last token's index."""
    first, token, inside = tokens
    own = tl.load(ids + first + token, mask=inside, other=-2)
    end = tl.minimum(length - chunk * CHUNK, CHUNK) - 1
    incoming = tl.where(chunk > 0, load_or_zero(ids + first - 1, chunk > 0), tl.load(before + row))
    return own, incoming, tl.load(ids + first + end), end


@triton.jit
def load_by_token(tensor, head_tokens):
    """Load a head's number for every token."""
    first, token, inside, head, HEADS = head_tokens
    return load_or_zero(tensor + ((first + token) * HEADS + head), inside)


@triton.jit
def load_decays(decays, head_tokens, end, own, last, channel, K: constexpr, BY_CHANNEL: constexpr):
    """
    Return log decays from the start, factors to the chunk's end, both by token, and the factor for the state.

    By channel, this is a column (channel, 1), and queries and keys have the others already.
    """
    first, _token, _inside, head, HEADS = head_tokens
    if BY_CHANNEL:
        sums = tl.zeros((CHUNK,), tl.float32)
        to_end = exp_where(own == last, sums)
        at_end = load_or_zero(decays + (((first + end) * HEADS + head) * K + channel), channel < K)
        kept = tl.exp(at_end)[:, None]
    else:
        sums = load_by_token(decays, head_tokens)
        total = tl.load(decays + (first + end) * HEADS + head)
        to_end = exp_where(own == last, total - sums)
        kept = tl.exp(total)
    return sums, to_end, kept


@triton.jit
def load_tile(tensor, head_tokens, columns, WIDTH: constexpr):
    """Load tokens by a head's columns (columns,)."""
    first, token, inside, head, HEADS = head_tokens
    at = tensor + head * WIDTH + first * (HEADS * WIDTH) + (token[:, None] * (HEADS * WIDTH) + columns[None, :])
    return load_or_zero(at, mask_tile(inside, columns < WIDTH))


@triton.jit
def load_transposed(tensor, head_tokens, columns, WIDTH: constexpr):
    """Load `load_tile` transposed: columns by tokens."""
    first, token, inside, head, HEADS = head_tokens
    at = tensor + head * WIDTH + first * (HEADS * WIDTH) + (token[None, :] * (HEADS * WIDTH) + columns[:, None])
    return load_or_zero(at, inside[None, :] & (columns < WIDTH)[:, None])


@triton.jit
def store_tile(tensor, head_tokens, columns, WIDTH: constexpr, values):
    """Store tokens by a head's columns (columns,)."""
    first, token, inside, head, HEADS = head_tokens
    at = tensor + head * WIDTH + first * (HEADS * WIDTH) + (token[:, None] * (HEADS * WIDTH) + columns[None, :])
    tl.store(at, values, mask=mask_tile(inside, columns < WIDTH))


@triton.jit
def load_state_tile(states, number, k_columns, v_columns, K: constexpr, V: constexpr):
    """Load a tile (k_columns, v_columns) of a state."""
    at = states + number.to(tl.int64) * (K * V) + (k_columns[:, None] * V + v_columns[None, :])
    return load_or_zero(at, mask_tile(k_columns < K, v_columns < V))


@triton.jit
def store_state_tile(states, number, k_columns, v_columns, K: constexpr, V: constexpr, values):
    """Store a tile (k_columns, v_columns) of a state."""
    at = states + number.to(tl.int64) * (K * V) + (k_columns[:, None] * V + v_columns[None, :])
    tl.store(at, values, mask=mask_tile(k_columns < K, v_columns < V))


@triton.jit
def multiply(left, right, PRECISION: constexpr):
    """Return a matrix product, float32."""
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def sum_tokens(exists, x):
    """Return sums of tokens in x, float32 (CHUNK, columns), for rows of tokens in exists, (CHUNK, CHUNK)."""
    # Three bfloat16 numbers have all digits of a float32 one; products of float32 would need more.
    ones, upper = tl.where(exists, 1.0, 0.0).to(tl.bfloat16), x.to(tl.bfloat16)
    middle = (x - upper.to(tl.float32)).to(tl.bfloat16)
    lower = (x - upper.to(tl.float32) - middle.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(ones, upper, tl.dot(ones, middle, tl.dot(ones, lower)))


@triton.jit
def multiply_columns(
    left, tensor, result, head_tokens, WIDTH: constexpr, BLOCK: constexpr, PRECISION: constexpr
):  # fmt: skip
    """Store left (CHUNK, CHUNK) times a head's tokens by all columns, BLOCK columns at a time."""
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        product = multiply(left, load_tile(tensor, head_tokens, column, WIDTH), PRECISION)
        store_tile(result, head_tokens, column, WIDTH, product)


@triton.jit
def exp_where(exists, exponents):
    """Return exp of exponents, and 0 elsewhere."""
    return tl.exp(tl.where(exists, exponents, -float("inf")))


@triton.jit
def mask_causal_document_pairs(own, inside):
    """Return the pairs (query, key) within a document, up to the query itself."""
    token = tl.arange(0, CHUNK)
    return (own[:, None] == own[None, :]) & (token[:, None] >= token[None, :]) & inside[:, None]


@triton.jit
def mask_document_pairs_by_key(own, inside):
    """Return the pairs (key, query) within a document, from the key itself on."""
    token = tl.arange(0, CHUNK)
    return (own[:, None] == own[None, :]) & (token[:, None] <= token[None, :]) & inside[:, None]


@triton.jit
def invert_unit_lower_triangular(system, DTYPE: constexpr, PRECISION: constexpr):
    """
    Invert I + system, for a strictly lower triangular (64, 64), with products in a dtype.

    Blocks with 16 rows on the diagonal are inverted by forward substitution. With D their inverse and B = D times the
    blocks below, the result is (I - B)(I + B^2) D, since B^4 is 0.
    """
    SIZE: constexpr = 16
    COUNT: constexpr = CHUNK // 16
    block, other = tl.arange(0, COUNT)[:, None, None, None], tl.arange(0, COUNT)[None, None, :, None]
    row, column = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    diagonal = tl.sum(tl.where(block == other, tl.reshape(system, (COUNT, SIZE, COUNT, SIZE)), 0.0), 2)
    solved = tl.where(row == column, 1.0, 0.0) + diagonal * 0.0
    for number in range(SIZE - 1):
        below = tl.sum(tl.where(column == number, diagonal, 0.0), 2)
        done = tl.sum(tl.where(row == number, solved, 0.0), 1)
        solved -= below[:, :, None] * done[:, None, :]
    inverse = tl.reshape(tl.where(block == other, solved[:, :, None, :], 0.0), (CHUNK, CHUNK))
    token = tl.arange(0, CHUNK)
    below = tl.where((token // SIZE)[:, None] > (token // SIZE)[None, :], system, 0.0).to(DTYPE)
    blocks = inverse.to(DTYPE)
    below = multiply(blocks, below, PRECISION).to(DTYPE)
    squared = multiply(below, below, PRECISION).to(DTYPE)
    inverse += multiply(squared, blocks, PRECISION)
    return inverse - multiply(below, inverse.to(DTYPE), PRECISION)


# fmt: off
@cache_launches("length", "chunks")
def carry_states(
    k, v, decays, ids, before, state, states, result, length, chunks, HEADS: constexpr, GROUPS: constexpr,
    K: constexpr, V: constexpr, BK: constexpr, BV: constexpr, PRECISION: constexpr,
    BY_CHANNEL: constexpr, BACK: constexpr,
):
    # fmt: on
    """
    Store a tile (BK, BV) of the state before every chunk in a row, and of the last state, if k times v is added.

    If BACK, store gradients for the states after all chunks, from queries and results' gradients in place of k and v.
    """
    BLOCKS: constexpr = (V + BV - 1) // BV
    row, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    channel = tl.program_id(0) // BLOCKS * BK + tl.arange(0, BK)
    column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    carried = tl.zeros((BK, BV), tl.float32)
    if state is not None:
        carried += load_state_tile(state, row * HEADS + head, channel, column, K, V).to(tl.float32)
    for number in range(0, chunks):
        chunk = chunks - 1 - number if BACK else number
        narrow = carried.to(states.dtype.element_ty)
        store_state_tile(states, (row * chunks + chunk) * HEADS + head, channel, column, K, V, narrow)
        tokens = locate_tokens(row, chunk, length)
        own, incoming, last, end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
        head_tokens, key_tokens = tokens + (head, HEADS), tokens + (head // GROUPS, HEADS // GROUPS)
        sums, to_end, kept = load_decays(decays, head_tokens, end, own, last, channel, K, BY_CHANNEL)
        factors = exp_where(own == incoming, sums) if BACK else to_end
        values = load_tile(v, head_tokens, column, V).to(tl.float32)
        key = load_transposed(k, key_tokens, channel, K)
        carried *= tl.where(last == incoming, kept, 0.0)
        carried = tl.dot(key, (values * factors[:, None]).to(key.dtype), carried, input_precision=PRECISION)
    if result is not None:
        store_state_tile(result, row * HEADS + head, channel, column, K, V, carried)


def get_float32_product_precision() -> str:
    """Return tl.dot's precision for float32: "tf32" if torch allows TF32, else "tf32x3"."""
    # Products in full float32 do not use tensor cores, and take minutes to compile here.
    return "tf32" if get_dot_precision() == "tf32" else "tf32x3"


class ChunkSizes(NamedTuple):
    """Sizes in a call, and block sizes for its kernels."""

    rows: int
    length: int
    heads: int
    groups: int
    width: int
    v_width: int
    chunks: int
    itemsize: int
    multiprocessors: int

    @classmethod
    def from_keys_and_values(cls, k: Tensor, v: Tensor) -> "ChunkSizes":
        rows, length, heads, v_width = v.shape
        groups, chunks = heads // k.shape[2], cdiv(length, CHUNK_SIZE)
        return cls(rows, length, heads, groups, k.shape[3], v_width, chunks, v.itemsize, sm_count(v.device))

    @property
    def fits_several_chunks(self) -> bool:
        """Return whether several chunks' tiles fit into shared memory."""
        return self.itemsize * max(MIN_BLOCK, next_power_of_2(self.width)) <= 256

    @property
    def has_small_tiles(self) -> bool:
        """Return whether tiles have 16-bit elements and at most 128 key channels; others would be spilled."""
        return self.itemsize == 2 and self.fits_several_chunks

    @property
    def columns_per_carry_tile(self) -> int:
        """
        Return a state's columns that one program of a sequential kernel computes.

        Wide tiles, with MIN_BLOCK columns, read keys less often; a few rows need narrow ones, with half as many, to
        occupy all multiprocessors.
        """
        programs = self.rows * self.heads * cdiv(self.v_width, MIN_BLOCK)
        return MIN_BLOCK if self.has_small_tiles and programs >= self.multiprocessors else MIN_BLOCK // 2

    @property
    def wide_tile_columns(self) -> int:
        """Return the columns in a tile where nothing else needs shared memory."""
        return 2 * MIN_BLOCK if self.v_width > MIN_BLOCK and self.fits_several_chunks else MIN_BLOCK

    @property
    def chunk_head_count(self) -> int:
        """Return how many chunks all rows and value heads have."""
        return self.rows * self.chunks * self.heads

    @property
    def key_parts(self) -> int:
        """Return how many parts with MIN_BLOCK channels a key has."""
        return cdiv(self.width, MIN_BLOCK)

    def allocate_states(self, like: Tensor) -> Tensor:
        """Return memory for the states before all chunks (rows, chunks, heads, K, V)."""
        return like.new_empty(self.rows, self.chunks, self.heads, self.width, self.v_width)

    def limit_registers_for_small_tiles(self, count: int) -> dict[str, int]:
        """Return the launch option for at most `count` registers, unless tiles are large and would be spilled."""
        return limit_registers(count) if self.has_small_tiles else {}

    @property
    def constants(self) -> dict[str, Any]:
        """Return the constants for most kernels."""
        return {
            "HEADS": self.heads,
            "GROUPS": self.groups,
            "K": self.width,
            "V": self.v_width,
            "BK": max(MIN_BLOCK, next_power_of_2(self.width)),
            "BV": MIN_BLOCK,
            "PRECISION": get_float32_product_precision(),
        }
