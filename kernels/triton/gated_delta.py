"""
The gated delta rule in Triton, forward and backward, in chunks with 64 tokens.

The forward pass has three kernels: they solve the triangular systems by chunk, carry the state from chunk to chunk, and
compute results. The backward pass repeats the first two, carries the state's gradient from the last chunk to the first,
and computes all other gradients by chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import once_differentiable, register_kernel
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
32 columns on eight warps read outside of shared memory (Triton 3.6).
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
    results: tuple[Tensor, Tensor] = _GatedDelta.apply(q, k, v, g, beta, *documents, state)  # type: ignore[no-untyped-call]
    return results


class _GatedDelta(Function):
    """The gated delta rule; saves its inputs, the sums of decays and the inverse systems."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        ids: Tensor,
        before: Tensor,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return results (rows, length, value_heads, V) and states (rows, value_heads, K, V)."""
        mixed, last, decays, inverse = _forward(q, k, v, g, beta, ids, before, state)
        ctx.save_for_backward(q, k, v, g, beta, ids, before, state, decays, inverse)
        return mixed, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        grads = _backward(grad, grad_state, *ctx.saved_tensors)
        return *grads[:5], None, None, grads[5] if ctx.needs_input_grad[7] else None


def _allocate_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ids: Tensor, before: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return results, last states, sums of decays and inverse systems."""
    last = v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
    by_head = v.shape[:3]
    return v.new_empty(v.shape), last, v.new_empty(by_head, dtype=torch.float32), v.new_empty(*by_head, CHUNK)


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
    """Return the backward pass's FLOPs; it computes chunks and states again."""
    width, v_width = k.shape[3], v.shape[3]
    return _count_forward_flops(k, v) + v.shape[:3].numel() * (
        14 * width * v_width + CHUNK * (18 * width + 10 * v_width)
    )


def _count_forward_scratch_bytes(k: Tensor, v: Tensor) -> int:
    tokens = v.shape[:3].numel()
    states = cdiv(v.shape[1], CHUNK) * v.shape[0] * v.shape[2] * k.shape[3] * v.shape[3]
    return (tokens * (k.shape[3] + v.shape[3] + CHUNK) + states) * v.itemsize + 4 * tokens


def _count_backward_scratch_bytes(k: Tensor, v: Tensor) -> int:
    tokens = v.shape[:3].numel()
    states = cdiv(v.shape[1], CHUNK) * v.shape[0] * v.shape[2] * k.shape[3] * v.shape[3]
    by_value_head = tokens * k.shape[3] * (4 + 2 * v.itemsize)
    return _count_forward_scratch_bytes(k, v) + (tokens * v.shape[3] + states) * v.itemsize + by_value_head + 8 * tokens


@register_kernel(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor ids, Tensor before, Tensor? state) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    fake=_allocate_forward,
    flops=_count_forward_flops,
    scratch=_count_forward_scratch_bytes,
)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ids: Tensor, before: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results, last, decays, inverse = _allocate_forward(q, k, v, g, beta, ids, before, state)
    if not v.shape[:3].numel():
        last.zero_() if state is None else last.copy_(state)
        return results, last, decays, inverse
    sizes = _Sizes.of(k, v)
    q, k, v, g, beta, ids = (x.contiguous() for x in (q, k, v, g, beta, ids))
    chunks = _Chunks(decays, inverse, v.new_empty(*v.shape[:3], sizes.width), v.new_empty(v.shape))
    _solve_chunks(sizes, chunks, k, v, g, beta, ids=ids, before=before, is_solved=False)
    states = _carry_states(sizes, chunks, k, ids, before, state=state, last=last)
    kernels.compute_results[(sizes.chunks * sizes.rows * cdiv(sizes.v_width, MIN_BLOCK), sizes.heads)](
        *(q, k, chunks.written, states, chunks.decays, ids, before, results, sizes.length, sizes.chunks),
        **sizes.constants,
        PRECISION=_float32_product_precision(),
        num_warps=4,
        **sizes.limit_registers(128),
    )
    return results, last, decays, inverse


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
    def of(cls, k: Tensor, v: Tensor) -> "_Sizes":
        rows, length, heads, v_width = v.shape
        groups, multiprocessors = heads // k.shape[2], sm_count(v.device)
        return cls(rows, length, heads, groups, k.shape[3], v_width, cdiv(length, CHUNK), v.itemsize, multiprocessors)

    @property
    def fits_several_chunks(self) -> bool:
        """Return whether several chunks' tiles fit into shared memory."""
        return self.itemsize * max(MIN_BLOCK, next_power_of_2(self.width)) <= 256

    @property
    def carry_tile_columns(self) -> int:
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

    def limit_registers(self, count: int) -> dict[str, int]:
        """Return the launch option for at most `count` registers, unless tiles are large and would be spilled."""
        return limit_registers(count) if self.itemsize == 2 and self.fits_several_chunks else {}

    @property
    def constants(self) -> dict[str, int]:
        """Return the constants for all kernels."""
        return {
            "HEADS": self.heads,
            "GROUPS": self.groups,
            "K": self.width,
            "V": self.v_width,
            "BK": max(MIN_BLOCK, next_power_of_2(self.width)),
            "BV": MIN_BLOCK,
            "CHUNK": CHUNK,
        }


class _Chunks(NamedTuple):
    """
    Solved chunks.

    They have sums of decays, float32 (rows, length, heads), the inverse systems (rows, length, heads, CHUNK), and their
    products with keys (..., K) and values (..., V); `_carry_states` replaces the latter by written values.
    """

    decays: Tensor
    inverse: Tensor
    keys: Tensor
    written: Tensor


def _solve_chunks(
    sizes: _Sizes,
    chunks: _Chunks,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ids: Tensor,
    before: Tensor,
    is_solved: bool,
) -> None:
    """Write all tensors of `chunks`, or its products alone if the systems are solved."""
    kernels.solve_chunks[(sizes.chunks * sizes.rows, sizes.heads)](
        *(k, v, g, beta, ids, before, *chunks, sizes.length, sizes.chunks),
        **{**sizes.constants, "BV": sizes.wide_tile_columns},
        PRECISION=_float32_product_precision(),
        IS_SOLVED=is_solved,
        num_warps=4,
        **sizes.limit_registers(128 if is_solved else 168),
    )


def _carry_states(
    sizes: _Sizes,
    chunks: _Chunks,
    k: Tensor,
    ids: Tensor,
    before: Tensor,
    *,
    state: Tensor | None,
    last: Tensor | None,
) -> Tensor:
    """Return states before chunks (rows, chunks, heads, K, V); write the tokens' values, and the last state."""
    states = k.new_empty(sizes.rows, sizes.chunks, sizes.heads, sizes.width, sizes.v_width)
    block = sizes.carry_tile_columns
    kernels.carry_states[(cdiv(sizes.v_width, block), sizes.rows * sizes.heads)](
        *(k, chunks.keys, chunks.written, chunks.decays, ids, before),
        *(None if state is None else state.contiguous(), states, last, sizes.length, sizes.chunks),
        **{**sizes.constants, "BV": block},
        PRECISION=_float32_product_precision(),
        num_warps=4,
        num_stages=(4 if block < MIN_BLOCK else 2) if sizes.fits_several_chunks else 1,
    )
    return states


def _allocate_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    return *grads, grad_state.new_empty(grad_state.shape if state is not None else 0)  # type: ignore[return-value]


@register_kernel(
    "gated_delta_rule_backward(Tensor grad, Tensor grad_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
    "Tensor ids, Tensor before, Tensor? state, Tensor decays, Tensor inverse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_allocate_backward,
    flops=_count_backward_flops,
    scratch=_count_backward_scratch_bytes,
)
def _backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = _allocate_backward(grad, grad_state, q, k, v, g, beta, ids, before, state, decays, inverse)
    if not v.shape[:3].numel():
        if state is not None:
            grads[5].copy_(grad_state)
        return grads
    sizes, precision = _Sizes.of(k, v), _float32_product_precision()
    grad, q, k, v, g, beta, ids = (x.contiguous() for x in (grad, q, k, v, g, beta, ids))
    chunks = _Chunks(decays, inverse, v.new_empty(*v.shape[:3], sizes.width), v.new_empty(v.shape))
    _solve_chunks(sizes, chunks, k, v, g, beta, ids=ids, before=before, is_solved=True)
    states = _carry_states(sizes, chunks, k, ids, before, state=state, last=None)
    grad_q, grad_k = (v.new_empty(*v.shape[:3], sizes.width) for _ in "qk")
    grad_written, grad_states = v.new_empty(v.shape), torch.empty_like(states)
    by_chunk, constants = (sizes.chunks * sizes.rows, sizes.heads), sizes.constants
    wide = sizes.wide_tile_columns
    blocks = cdiv(sizes.v_width, wide)
    kernels.compute_grad_written[(sizes.chunks * sizes.rows * blocks, sizes.heads)](
        *(grad, q, k, chunks.decays, ids, grad_written, sizes.length, sizes.chunks),
        **{**constants, "BV": wide},
        PRECISION=precision,
        num_warps=4,
    )
    block = sizes.carry_tile_columns
    kernels.carry_gradients_back[(cdiv(sizes.v_width, block), sizes.rows * sizes.heads)](
        *(grad, grad_state.contiguous(), q, k, chunks.keys, chunks.decays, ids, before, grad_written, grad_states),
        *(grads[5] if state is not None else None, sizes.length, sizes.chunks),
        **{**constants, "BV": block},
        PRECISION=precision,
        num_warps=4 if block < MIN_BLOCK else 8,
        num_stages=3 if sizes.fits_several_chunks else 1,
    )
    # Four warps read 32 columns in bounds; eight need 64, whose float32 tiles exceed shared memory for wide keys.
    is_large = sizes.itemsize == 4 and sizes.width > 64
    partial_k = torch.empty_like(grad_k, dtype=torch.float32)
    grad_decays = torch.empty_like(chunks.decays)
    kernels.compute_product_gradients[by_chunk](
        *(grad, q, k, chunks.written, states, grad_states, chunks.decays, ids, before),
        *(grad_q, partial_k, grad_decays, sizes.length, sizes.chunks),
        **{**constants, "BV": MIN_BLOCK // 2 if is_large else MIN_BLOCK},
        PRECISION=precision,
        num_warps=8,
    )
    kernels.compute_system_gradients[by_chunk](
        *(k, v, beta, chunks.inverse, chunks.written, states, grad_written, chunks.decays, ids, before),
        *(
            partial_k,
            grad_decays,
            torch.empty_like(inverse),
            grad_k,
            grads[2],
            grads[3],
            grads[4],
            sizes.length,
            sizes.chunks,
        ),
        **{**constants, "BV": MIN_BLOCK // 2 if is_large else MIN_BLOCK},
        PRECISION=precision,
        num_warps=4,
    )
    return _sum_over_value_heads(grad_q, sizes), _sum_over_value_heads(grad_k, sizes), *grads[2:]


def _sum_over_value_heads(grad: Tensor, sizes: _Sizes) -> Tensor:
    """Sum gradients (rows, length, value_heads, K) over value heads with a common key head."""
    if sizes.groups == 1:
        return grad
    summed = grad.new_empty(sizes.rows, sizes.length, sizes.heads // sizes.groups, sizes.width)
    count, block = summed.shape[:3].numel(), next_power_of_2(sizes.width)
    size = max(1, 4096 // block)
    kernels.sum_groups_kernel[(cdiv(count, size),)](
        grad, summed, count, GROUPS=sizes.groups, K=sizes.width, BK=block, SIZE=size, num_warps=4
    )
    return summed
