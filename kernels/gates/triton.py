"""
Gates of feed-forward networks in Triton: act(gate) * up for several functions, with or without a scale for each vector.

Contiguous tensors without a scale are treated as one long row, so that one compiled kernel serves all sizes.

SwiGLU in Triton, for two tensors or the halves of one, with or without a scale for each vector.

GeGLU in Triton.

gpt-oss's clamped SwiGLU in Triton, for a tensor's two halves, with or without a scale for each vector.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from drawloom.kernels.operation import make_differentiable, register_kernel
from drawloom.kernels.triton.primitives import (
    cache_launches,
    cdiv,
    check_floats,
    load_float32,
    next_power_of_2,
    view_as_rows,
)

TILE = 2048
"""Elements that a program processes at a time: 8 per thread, 16 bytes of each tensor in half precision."""

SILU, GELU_TANH, CLAMPED = 0, 1, 2
"""
Functions of gate and up: silu(gate) * up; gelu(gate) * up with the tanh approximation; and (up + 1) * gate *
sigmoid(alpha * gate), where gate is at most `limit`, and up is between -limit and limit.
"""


GELU_TANH_GATE, CLAMPED_GATE = constexpr(GELU_TANH), constexpr(CLAMPED)


def _view_as_rows_or_one_row(tensors: tuple[Tensor, ...], whole: bool) -> list[Tensor]:
    """Return tensors as rows of equal shape, or as a single row if all are contiguous and rows need not stay whole."""
    if not whole and all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors]
    return [view_as_rows(x) for x in tensors]


def _choose_tile_size(count: int, width: int) -> int:
    """Return the tile size in elements; all single rows have the same, so no other kernel is compiled."""
    return TILE if count == 1 else min(TILE, next_power_of_2(width))


@triton.jit
def _clamp_but_keep_nan(x, least: constexpr, most: constexpr):
    """Return x between two bounds; NaN stays NaN, unlike in tl.clamp."""
    return tl.where(x > most, most, tl.where(x < least, least, x))


@triton.jit
def _compute_activation_and_derivative(gates, FUNCTION: constexpr, ALPHA: constexpr, LIMIT: constexpr):
    """Return the activated gates and the activation's derivatives."""
    if FUNCTION == GELU_TANH_GATE:
        # (1 + tanh(u)) / 2 = sigmoid(2 u), and 2 u = 2 sqrt(2 / pi) (x + 0.044715 x^3). Beyond 10 it is 0 or 1, and
        # the cube of a large gate would overflow.
        near = _clamp_but_keep_nan(gates, -10.0, 10.0)
        square = near * near
        double = near * (1.5957691216057308 + 0.07135481627260025 * square)
        sigmoid = tl.sigmoid(double)
        slope = 1.5957691216057308 + 0.21406444881780076 * square
        value = gates * sigmoid
        # tl.sigmoid(-double) is 1 - sigmoid, of which a difference would keep few digits, and the slope is large.
        derivative = sigmoid + near * sigmoid * tl.sigmoid(-double) * slope
    elif FUNCTION == CLAMPED_GATE:
        bounded = tl.where(gates > LIMIT, LIMIT, gates)
        sigmoid = tl.sigmoid(ALPHA * bounded)
        value = bounded * sigmoid
        derivative = tl.where(gates > LIMIT, 0.0, sigmoid + ALPHA * value * (1.0 - sigmoid))
    else:
        sigmoid = tl.sigmoid(gates)
        value = gates * sigmoid
        derivative = sigmoid + value * (1.0 - sigmoid)
    return value, derivative


@triton.jit
def _compute_up_factor_and_derivative(ups, FUNCTION: constexpr, LIMIT: constexpr):
    """Return the activated gates' factors, computed from `ups`, and the factors' derivatives."""
    if FUNCTION == CLAMPED_GATE:
        factor = _clamp_but_keep_nan(ups, -LIMIT, LIMIT) + 1.0
        derivative = tl.where((ups <= LIMIT) & (ups >= -LIMIT), 1.0, 0.0)
    else:
        factor = ups
        derivative = 1.0
    return factor, derivative


# fmt: off
@cache_launches("tiles")
def _gate_kernel(
    gate, up, result, scale, width, tiles, gate_stride, up_stride, result_stride, BLOCK: constexpr,
    FUNCTION: constexpr, ALPHA: constexpr, LIMIT: constexpr,
):
    # fmt: on
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gates = load_float32(gate + row * gate_stride + column, inside)
    ups = load_float32(up + row * up_stride + column, inside)
    values, _ = _compute_activation_and_derivative(gates, FUNCTION, ALPHA, LIMIT)
    factors, _ = _compute_up_factor_and_derivative(ups, FUNCTION, LIMIT)
    values *= factors
    if scale is not None:
        values *= tl.load(scale + row).to(tl.float32)
    tl.store(result + row * result_stride + column, values, mask=inside)


# fmt: off
@cache_launches("tiles")
def _backward_kernel(
    grad, gate, up, grad_gate, grad_up, scale, grad_scale, width, tiles, grad_stride, gate_stride, up_stride,
    grad_gate_stride, grad_up_stride, BLOCK: constexpr, FUNCTION: constexpr, ALPHA: constexpr,
    LIMIT: constexpr,
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
        grads = load_float32(grad + row * grad_stride + column, inside)
        gates = load_float32(gate + row * gate_stride + column, inside)
        ups = load_float32(up + row * up_stride + column, inside)
        values, derivative = _compute_activation_and_derivative(gates, FUNCTION, ALPHA, LIMIT)
        factors, up_derivative = _compute_up_factor_and_derivative(ups, FUNCTION, LIMIT)
        if scale is not None:
            total += grads * values * factors
            grads *= factor
        grad_gates = (grads * factors * derivative).to(grad_gate.dtype.element_ty)
        grad_ups = (grads * values * up_derivative).to(grad_up.dtype.element_ty)
        tl.store(grad_gate + row * grad_gate_stride + column, grad_gates, mask=inside)
        tl.store(grad_up + row * grad_up_stride + column, grad_ups, mask=inside)
    if scale is not None:
        tl.store(grad_scale + row, tl.sum(total, 0))


def swiglu_triton(gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
    """Compute swiglu_eager for float32, bfloat16 and float16: gate and up (..., width), scale (...,)."""
    check_floats("swiglu_triton", gate, up)
    return _differentiable_gate(gate, up, scale, SILU)


def swiglu_halves_triton(gate_and_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """
    Compute swiglu_halves_eager for float32, bfloat16 and float16: gate_and_up (..., 2 * width), scale (...,).

    Returns (..., width); the gradient of `gate_and_up` is one tensor, without a concatenation.
    """
    check_floats("swiglu_halves_triton", gate_and_up)
    return _differentiable_gate_of_halves(gate_and_up, scale, SILU)


def geglu_triton(gate: Tensor, up: Tensor) -> Tensor:
    """Compute geglu_eager for float32, bfloat16 and float16: gate and up (..., width)."""
    check_floats("geglu_triton", gate, up)
    return _differentiable_gate(gate, up, None, GELU_TANH)


def oss_swiglu_halves_triton(gate_and_up: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
    """
    Compute oss_swiglu_halves_eager for float32, bfloat16 and float16: gate_and_up (..., 2 * width), scale (...,).

    Returns (..., width); the gradient of `gate_and_up` is one tensor, without a concatenation.
    """
    check_floats("oss_swiglu_halves_triton", gate_and_up)
    return _differentiable_gate_of_halves(gate_and_up, scale, CLAMPED, alpha, limit)


@register_kernel("gate", lambda gate: gate.new_empty(gate.shape))
def _apply_gate(
    result: Tensor,
    gate: Tensor,
    up: Tensor,
    scale: Tensor | None,
    function: int,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> None:
    """Fill the result; gate and up are (..., width), scale is (...), and only the clamped gate has alpha and limit."""
    if not result.numel():
        return
    rows = _view_as_rows_or_one_row((gate, up, result), whole=scale is not None)
    count, width = rows[0].shape
    block = _choose_tile_size(count, width)
    tiles = cdiv(width, block)
    _gate_kernel[(count * tiles,)](
        *rows,
        None if scale is None else scale.contiguous(),
        width,
        tiles,
        *(x.stride(0) for x in rows),
        BLOCK=block,
        FUNCTION=function,
        ALPHA=alpha,
        LIMIT=limit,
        num_warps=max(1, block // 256),
    )


def _apply_gate_to_halves(
    gate_and_up: Tensor, scale: Tensor | None, function: int, alpha: float = 1.0, limit: float = 0.0
) -> Tensor:
    gate, up = gate_and_up.chunk(2, -1)
    return _apply_gate(gate, up, scale, function, alpha, limit)


def _allocate_scale_gradient(grad: Tensor, scale: Tensor | None) -> Tensor:
    """Return an empty gradient for the scale (...), without elements if there is no scale; grad is (..., width)."""
    return grad.new_empty(0) if scale is None else scale.new_empty(scale.shape)


@register_kernel(
    "gate_backward",
    lambda grad, gate, up, scale: (
        gate.new_empty(gate.shape),
        up.new_empty(up.shape),
        _allocate_scale_gradient(grad, scale),
    ),
)
def _compute_gradients(
    grads: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    scale: Tensor | None,
    function: int,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> None:
    _launch_backward((grad, gate, up, *grads[:2]), scale, grads[2], function, alpha, limit)


@register_kernel(
    "gate_halves_backward",
    lambda grad, gate_and_up, scale: (gate_and_up.new_empty(gate_and_up.shape), _allocate_scale_gradient(grad, scale)),
)
def _compute_gradients_of_halves(
    grads: tuple[Tensor, Tensor],
    grad: Tensor,
    gate_and_up: Tensor,
    scale: Tensor | None,
    function: int,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> None:
    tensors = grad, *gate_and_up.chunk(2, -1), *grads[0].chunk(2, -1)
    _launch_backward(tensors, scale, grads[1], function, alpha, limit)


def _launch_backward(
    tensors: tuple[Tensor, ...], scale: Tensor | None, grad_scale: Tensor, function: int, alpha: float, limit: float
) -> None:
    """Fill grad_gate, grad_up and grad_scale; `tensors` are grad, gate, up, grad_gate and grad_up."""
    if not tensors[0].numel():
        grad_scale.zero_()
        return
    rows = _view_as_rows_or_one_row(tensors, whole=scale is not None)
    count, width = rows[0].shape
    block = _choose_tile_size(count, width)
    tiles = 1 if scale is not None else cdiv(width, block)
    _backward_kernel[(count * tiles,)](
        *rows,
        None if scale is None else scale.contiguous(),
        None if scale is None else grad_scale,
        width,
        tiles,
        *(x.stride(0) for x in rows),
        BLOCK=block,
        FUNCTION=function,
        ALPHA=alpha,
        LIMIT=limit,
        num_warps=max(1, block // 256),
    )


_differentiable_gate = make_differentiable(_apply_gate, _compute_gradients)
_differentiable_gate_of_halves = make_differentiable(_apply_gate_to_halves, _compute_gradients_of_halves)
