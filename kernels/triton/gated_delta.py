"""
The gated delta rule in Triton, forward and backward, in chunks with 64 tokens.

The forward pass has three kernels: they solve the triangular systems by chunk, carry the state from chunk to chunk, and
compute results. The backward pass computes the states again from the written values, carries the state's gradient from
the last chunk to the first, and computes all other gradients by chunk, in kernels with one or two large sums each: with
more, a multiprocessor has registers for one program only, and waits for memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from drawloom.kernels.operation import make_differentiable, register_kernel
from drawloom.kernels.recurrence import RecurrentDocuments
from drawloom.kernels.triton import gated_delta_kernels as kernels
from drawloom.kernels.triton.launch import limit_registers
from drawloom.kernels.triton.primitives import cdiv, check_floats, get_dot_precision, next_power_of_2, sm_count

CHUNK = 64
"""Tokens in a chunk."""

MAX_WIDTH = 256
"""The widest key; values may have any width."""


MIN_BLOCK = 64
"""
Channels in the smallest tile. With 16, an H200 computed wrong results from the second chunk on, and products with
32 columns on eight warps read outside shared memory (Triton 3.6).
"""


def delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: RecurrentDocuments,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Compute delta_rule_eager for float32, bfloat16 and float16, and keys with at most MAX_WIDTH channels.

    q and k (rows, length, key_heads, K), v (rows, length, value_heads, V), g and beta (rows, length, value_heads); the
    state is float32 (rows, value_heads, K, V). In 16 bits, systems are inverted in float16: keys should have unit norm.
    """
    check_floats("delta_rule_triton", q, k, v, g, beta)
    if k.shape[-1] > MAX_WIDTH:
        raise ValueError(f"keys are {k.shape[-1]} wide, and the kernel accepts at most {MAX_WIDTH}")
    return _differentiable_delta_rule(q, k, v, g, beta, *documents, state)  # type: ignore[no-any-return]


def _allocate_forward(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return results, last states, decay sums, inverse systems and written values."""
    last = v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
    decays, inverse = v.new_empty(v.shape[:3], dtype=torch.float32), v.new_empty(*v.shape[:3], CHUNK)
    return v.new_empty(v.shape), last, decays, inverse, v.new_empty(v.shape)


def _float32_product_precision() -> str:
    """Return tl.dot's precision for float32: "tf32" if torch allows TF32, else "tf32x3"."""
    # Products in full float32 do not use tensor cores, and take minutes to compile here.
    return "tf32" if get_dot_precision() == "tf32" else "tf32x3"


def _count_forward_flops(k: Tensor, v: Tensor) -> float:
    """Return the products' FLOPs, for all tokens and heads."""
    width, v_width = k.shape[3], v.shape[3]
    inside = 6 * CHUNK * width + 4 * CHUNK * v_width + 2 * CHUNK * CHUNK / 3
    return v.shape[:3].numel() * (6 * width * v_width + inside)


def _count_backward_flops(k: Tensor, v: Tensor) -> float:
    """Return the backward pass's FLOPs; it computes states again."""
    width, v_width = k.shape[3], v.shape[3]
    return v.shape[:3].numel() * (14 * width * v_width + 2 * CHUNK * (6 * width + 4 * v_width))


def _count_state_bytes(k: Tensor, v: Tensor) -> int:
    """Return the bytes for the states before all chunks."""
    return cdiv(v.shape[1], CHUNK) * v.shape[0] * v.shape[2] * k.shape[3] * v.shape[3] * v.itemsize


def _count_forward_scratch_bytes(k: Tensor, v: Tensor) -> int:
    return v.shape[:3].numel() * k.shape[3] * v.itemsize + _count_state_bytes(k, v)


def _count_backward_scratch_bytes(k: Tensor, v: Tensor) -> int:
    """Return the bytes for keys, gradients, states and sums."""
    keys = (1 if k.shape[2] == v.shape[2] else 2) * k.shape[3]
    by_token = (keys + v.shape[3] + 2 * CHUNK) * v.itemsize + 8 * (1 + cdiv(k.shape[3], MIN_BLOCK))
    return v.shape[:3].numel() * by_token + 2 * _count_state_bytes(k, v)


@register_kernel(
    "gated_delta_rule", _allocate_forward, flops=_count_forward_flops, scratch=_count_forward_scratch_bytes
)
def _forward(
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ids: Tensor,
    before: Tensor,
    state: Tensor | None,
) -> None:
    mixed, last, decays, inverse, written = results
    if not v.shape[:3].numel():
        last.zero_() if state is None else last.copy_(state)
        return
    sizes = _Sizes.from_keys_and_values(k, v)
    q, k, v, g, beta, ids = (x.contiguous() for x in (q, k, v, g, beta, ids))
    state = None if state is None else state.contiguous()
    keys, states = v.new_empty(*v.shape[:3], sizes.width), sizes.allocate_states(v)
    kernels.solve_chunk_systems[(sizes.chunk_head_count,)](
        *(k, v, g, beta, ids, before, decays, inverse, keys, written, sizes.length, sizes.chunks),
        **{**sizes.constants, "BV": sizes.wide_tile_columns},
        num_warps=4,
        **sizes.limit_registers_for_small_tiles(168),
    )
    block = sizes.columns_per_carry_tile
    kernels.carry_states_and_update_written[(cdiv(sizes.v_width, block), sizes.rows * sizes.heads)](
        *(k, keys, written, decays, ids, before, state, states, last, sizes.length, sizes.chunks),
        **{**sizes.constants, "BV": block},
        num_warps=4,
        num_stages=(4 if block < MIN_BLOCK else 2) if sizes.fits_several_chunks else 1,
    )
    kernels.compute_results[(sizes.chunk_head_count * cdiv(sizes.v_width, MIN_BLOCK),)](
        *(q, k, written, states, decays, ids, before, mixed, sizes.length, sizes.chunks),
        **sizes.constants,
        num_warps=4,
        **sizes.limit_registers_for_small_tiles(128),
    )


class _Sizes(NamedTuple):
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
    def from_keys_and_values(cls, k: Tensor, v: Tensor) -> "_Sizes":
        rows, length, heads, v_width = v.shape
        groups, multiprocessors = heads // k.shape[2], sm_count(v.device)
        return cls(rows, length, heads, groups, k.shape[3], v_width, cdiv(length, CHUNK), v.itemsize, multiprocessors)

    @property
    def fits_several_chunks(self) -> bool:
        """Return whether several chunks' tiles fit into shared memory."""
        return self.itemsize * max(MIN_BLOCK, next_power_of_2(self.width)) <= 256

    @property
    def columns_per_carry_tile(self) -> int:
        """
        Return the columns in a sequential kernel's tile.

        Wide tiles read keys less often, but a few rows need narrow ones to occupy all multiprocessors.
        """
        programs = self.rows * self.heads * cdiv(self.v_width, MIN_BLOCK)
        has_small_tiles = self.itemsize == 2 and self.fits_several_chunks
        return MIN_BLOCK if has_small_tiles and programs >= self.multiprocessors else MIN_BLOCK // 2

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
        return limit_registers(count) if self.itemsize == 2 and self.fits_several_chunks else {}

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
            "CHUNK": CHUNK,
            "PRECISION": _float32_product_precision(),
        }


def _allocate_gradients(
    grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, ...]:
    grads = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    return *grads, grad_state.new_empty(grad_state.shape if state is not None else 0)


@register_kernel(
    "gated_delta_rule_backward",
    _allocate_gradients,
    flops=_count_backward_flops,
    scratch=_count_backward_scratch_bytes,
)
def _backward(
    grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    grad: Tensor,
    grad_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ids: Tensor,
    before: Tensor,
    state: Tensor | None,
    decays: Tensor,
    inverse: Tensor,
    written: Tensor,
) -> None:
    if not v.shape[:3].numel():
        if state is not None:
            grads[5].copy_(grad_state)
        return
    sizes = _Sizes.from_keys_and_values(k, v)
    grad, q, k, v, beta, ids = (x.contiguous() for x in (grad, q, k, v, beta, ids))
    keys = v.new_empty(*v.shape[:3], sizes.width)
    grad_k = grads[1] if sizes.groups == 1 else torch.empty_like(keys)
    states, grad_states = (sizes.allocate_states(v) for _ in range(2))
    grad_written, grad_scores, grad_pairs = (torch.empty_like(x) for x in (v, inverse, inverse))
    grad_decays, grad_factors = (torch.empty_like(decays) for _ in range(2))
    part_decays, part_factors = (
        decays.new_empty(sizes.rows, sizes.length, sizes.key_parts, sizes.heads) for _ in range(2)
    )
    state = None if state is None else state.contiguous()
    constants, ends = sizes.constants, (sizes.length, sizes.chunks)
    parts = {**constants, "BK": MIN_BLOCK}
    kernels.multiply_keys_by_inverse[(sizes.chunk_head_count,)](
        *(k, beta, inverse, decays, ids, before, keys, *ends),
        **{name: constants[name] for name in ("HEADS", "GROUPS", "K", "BK", "CHUNK", "PRECISION")},
        num_warps=4,
    )
    kernels.recompute_states[(sizes.key_parts * cdiv(sizes.v_width, MIN_BLOCK), sizes.rows * sizes.heads)](
        *(k, written, decays, ids, before, state, states, *ends), **parts, num_warps=4, num_stages=4
    )
    kernels.compute_gradients_within_chunks[(sizes.chunk_head_count,)](
        *(grad, q, k, written, decays, ids, grad_written, grad_scores, grad_decays, *ends),
        **{**constants, "BV": sizes.wide_tile_columns},
        num_warps=4,
        num_stages=2,
        **sizes.limit_registers_for_small_tiles(168),
    )
    block = sizes.columns_per_carry_tile
    kernels.carry_gradients_back[(cdiv(sizes.v_width, block), sizes.rows * sizes.heads)](
        *(grad, grad_state.contiguous(), q, k, keys, decays, ids, before, grad_written, grad_states),
        *(grads[5] if state is not None else None, *ends),
        **{**constants, "BV": block},
        num_warps=4 if block < MIN_BLOCK else 8,
        num_stages=3 if sizes.fits_several_chunks else 1,
    )
    kernels.compute_system_gradients[(sizes.chunk_head_count,)](
        *(k, v, beta, inverse, written, grad_written, decays, ids, grads[2], grad_pairs, grad_factors, grad_decays),
        *ends,
        **constants,
        num_warps=4,
        num_stages=2,
        **sizes.limit_registers_for_small_tiles(168),
    )
    kernels.compute_query_gradients[(sizes.chunk_head_count // sizes.groups * sizes.key_parts,)](
        *(grad, q, k, states, grad_scores, decays, ids, before, part_decays, grads[0], *ends),
        **parts,
        num_warps=4,
        num_stages=3 if sizes.itemsize == 2 else 2,
        **sizes.limit_registers_for_small_tiles(128),
    )
    kernels.compute_key_gradients[(sizes.chunk_head_count * sizes.key_parts,)](
        *(q, k, beta, written, states, grad_written, grad_states, grad_scores, grad_pairs, decays, ids, before),
        *(part_decays, part_factors, grad_k, *ends),
        **parts,
        num_warps=4,
        num_stages=1,  # with more, tiles would be overwritten while products read them
        **sizes.limit_registers_for_small_tiles(168),
    )
    kernels.sum_g_and_beta_gradients_kernel[(sizes.chunk_head_count,)](
        *(part_decays, part_factors, grad_decays, grad_factors, ids, grads[3], grads[4], *ends),
        HEADS=sizes.heads,
        PARTS=sizes.key_parts,
        CHUNK=CHUNK,
        num_warps=1,
    )
    if sizes.groups > 1:
        _sum_over_value_heads(grad_k, grads[1], sizes)


def _compute_gradients(*arguments: Tensor) -> tuple[Tensor | None, ...]:
    *grads, grad_state = _backward(*arguments)
    return *grads, None, None, grad_state


_differentiable_delta_rule = make_differentiable(_forward, _compute_gradients, results=2)
"""The gated delta rule; saves its inputs, decay sums, inverse systems and written values."""


def _sum_over_value_heads(grad: Tensor, summed: Tensor, sizes: _Sizes) -> None:
    """Write summed gradients (rows, length, value_heads, K) over value heads with a common key head."""
    count, block = summed.shape[:3].numel(), next_power_of_2(sizes.width)
    size = max(1, 4096 // block)
    kernels.sum_value_heads_kernel[(cdiv(count, size),)](
        grad, summed, count, GROUPS=sizes.groups, K=sizes.width, BK=block, SIZE=size, num_warps=4
    )
