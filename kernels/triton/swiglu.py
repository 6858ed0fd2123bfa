"""
SwiGLU in Triton, of two tensors or of the halves of one, with or without a scale for each vector.

Contiguous tensors without a scale are treated as one long row, so that one compiled kernel serves all sizes.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.costs import no_flops, no_scratch
from drawloom.kernels.operation import once_differentiable, register_kernel
from drawloom.kernels.triton.launch import lean
from drawloom.kernels.triton.primitives import as_rows, cdiv, check_floats, next_power_of_2

TILE = 2048
"""Elements that a program processes at a time: 8 per thread, 16 bytes of each tensor in half precision."""


def swiglu_triton(gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
    """Compute swiglu_eager for float32, bfloat16 and float16: gate and up (..., width), scale (...,)."""
    check_floats("swiglu_triton", gate, up)
    result: Tensor = _SwiGlu.apply(gate, up, scale)  # type: ignore[no-untyped-call]
    return result


def swiglu_halves_triton(both: Tensor, scale: Tensor | None = None) -> Tensor:
    """
    Compute swiglu_halves_eager for float32, bfloat16 and float16: both (..., 2 * width), scale (...,).

    Returns (..., width); the gradient of `both` is one tensor, without a concatenation.
    """
    check_floats("swiglu_halves_triton", both)
    result: Tensor = _SwiGluHalves.apply(both, scale)  # type: ignore[no-untyped-call]
    return result


class _SwiGlu(Function):
    """SwiGLU that saves its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, scale: Tensor | None) -> Tensor:
        """Return a tensor like gate, for gate and up (..., width) of one dtype and scale (...)."""
        ctx.save_for_backward(gate, up, scale)
        return _forward(gate, up, scale)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        grad_gate, grad_up, grad_scale = _backward(grad, *ctx.saved_tensors)
        return grad_gate, grad_up, grad_scale if ctx.needs_input_grad[2] else None


class _SwiGluHalves(Function):
    """SwiGLU of two halves of a tensor, which it saves."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, scale: Tensor | None) -> Tensor:
        """Return (..., width) in the dtype of both (..., 2 * width); scale is (...)."""
        ctx.save_for_backward(both, scale)
        gate, up = both.chunk(2, -1)
        return _forward(gate, up, scale)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        grad_both, grad_scale = _halves_backward(grad, *ctx.saved_tensors)
        return grad_both, grad_scale if ctx.needs_input_grad[1] else None


def _like_forward(gate: Tensor, up: Tensor, scale: Tensor | None) -> Tensor:
    return gate.new_empty(gate.shape)


@register_kernel(
    "swiglu(Tensor gate, Tensor up, Tensor? scale) -> Tensor", fake=_like_forward, flops=no_flops, scratch=no_scratch
)
def _forward(gate: Tensor, up: Tensor, scale: Tensor | None) -> Tensor:
    result = _like_forward(gate, up, scale)
    if not result.numel():
        return result
    rows = _rows((gate, up, result), whole=scale is not None)
    count, width = rows[0].shape
    block = _block(count, width)
    tiles = cdiv(width, block)
    _forward_kernel[(count * tiles,)](
        *rows,
        None if scale is None else scale.contiguous(),
        width,
        tiles,
        *(x.stride(0) for x in rows),
        BLOCK=block,
        num_warps=max(1, block // 256),
        enable_fp_fusion=True,
    )
    return result


def _like_backward(grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of gate, up, and the scale (empty without a scale)."""
    return gate.new_empty(gate.shape), up.new_empty(up.shape), _like_scale(grad, scale)


@register_kernel(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up, Tensor? scale) -> (Tensor, Tensor, Tensor)",
    fake=_like_backward,
    flops=no_flops,
    scratch=no_scratch,
)
def _backward(grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    results = _like_backward(grad, gate, up, scale)
    _launch_backward((grad, gate, up, *results[:2]), scale, results[2])
    return results


def _like_halves_backward(grad: Tensor, both: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of both halves in one tensor, and of the scale (empty without a scale)."""
    return both.new_empty(both.shape), _like_scale(grad, scale)


@register_kernel(
    "swiglu_halves_backward(Tensor grad, Tensor both, Tensor? scale) -> (Tensor, Tensor)",
    fake=_like_halves_backward,
    flops=no_flops,
    scratch=no_scratch,
)
def _halves_backward(grad: Tensor, both: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    grad_both, grad_scale = _like_halves_backward(grad, both, scale)
    _launch_backward((grad, *both.chunk(2, -1), *grad_both.chunk(2, -1)), scale, grad_scale)
    return grad_both, grad_scale


def _like_scale(grad: Tensor, scale: Tensor | None) -> Tensor:
    return grad.new_empty(0) if scale is None else scale.new_empty(scale.shape)


def _launch_backward(tensors: tuple[Tensor, ...], scale: Tensor | None, grad_scale: Tensor) -> None:
    """Fill grad_gate, grad_up and grad_scale; `tensors` are grad, gate, up, grad_gate and grad_up."""
    if not tensors[0].numel():
        grad_scale.zero_()
        return
    rows = _rows(tensors, whole=scale is not None)
    count, width = rows[0].shape
    block = _block(count, width)
    tiles = 1 if scale is not None else cdiv(width, block)
    _backward_kernel[(count * tiles,)](
        *rows,
        None if scale is None else scale.contiguous(),
        None if scale is None else grad_scale,
        width,
        tiles,
        *(x.stride(0) for x in rows),
        BLOCK=block,
        num_warps=max(1, block // 256),
        enable_fp_fusion=True,
    )


def _rows(tensors: tuple[Tensor, ...], whole: bool) -> list[Tensor]:
    """Return tensors as rows of equal shape, or as a single row if all are contiguous and rows need not stay whole."""
    if not whole and all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors]
    return [as_rows(x) for x in tensors]


def _block(count: int, width: int) -> int:
    """Return the elements of a tile: one size for a single row of any length, so that no other kernel is compiled."""
    return TILE if count == 1 else min(TILE, next_power_of_2(width))


@lean
@triton.jit(do_not_specialize=["tiles"])
def _forward_kernel(gate, up, result, scale, width, tiles, gate_stride, up_stride, result_stride, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gates = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    values = gates * tl.sigmoid(gates)
    values *= tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        values *= tl.load(scale + row).to(tl.float32)
    tl.store(result + row * result_stride + column, values.to(result.dtype.element_ty), mask=inside)


# fmt: off
@lean
@triton.jit(do_not_specialize=["tiles"])
def _backward_kernel(
    grad, gate, up, grad_gate, grad_up, scale, grad_scale, width, tiles, grad_stride, gate_stride, up_stride,
    grad_gate_stride, grad_up_stride, BLOCK: tl.constexpr,
):
    # fmt: on
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK
    last = first + BLOCK
    if scale is not None:
        factor = tl.load(scale + row).to(tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        # A vector's scale has one gradient, so one program processes the whole row.
        last = tl.cast(width, tl.int64)
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        grads = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        gates = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        ups = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gates)
        silu = gates * sigmoid
        if scale is not None:
            total += grads * silu * ups
            grads *= factor
        derivative = sigmoid + silu * (1.0 - sigmoid)
        grad_gates = (grads * ups * derivative).to(grad_gate.dtype.element_ty)
        tl.store(grad_gate + row * grad_gate_stride + column, grad_gates, mask=inside)
        tl.store(grad_up + row * grad_up_stride + column, (grads * silu).to(grad_up.dtype.element_ty), mask=inside)
    if scale is not None:
        tl.store(grad_scale + row, tl.sum(total, 0).to(grad_scale.dtype.element_ty))
