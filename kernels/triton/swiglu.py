"""SwiGLU in Triton, of two tensors or of the halves of one, with or without a scale for each vector."""

from torch import Tensor

from drawloom.kernels.operation import make_differentiable, register_kernel
from drawloom.kernels.triton.gate_kernels import (
    SILU,
    Gate,
    allocate_scale_gradient,
    launch_gate_backward,
    launch_gate_forward,
)
from drawloom.kernels.triton.primitives import check_floats

SWIGLU = Gate(SILU)


def swiglu_triton(gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
    """Compute swiglu_eager for float32, bfloat16 and float16: gate and up (..., width), scale (...,)."""
    check_floats("swiglu_triton", gate, up)
    return _differentiable_swiglu(gate, up, scale)


def swiglu_halves_triton(gate_and_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """
    Compute swiglu_halves_eager for float32, bfloat16 and float16: gate_and_up (..., 2 * width), scale (...,).

    Returns (..., width); the gradient of `gate_and_up` is one tensor, without a concatenation.
    """
    check_floats("swiglu_halves_triton", gate_and_up)
    return _differentiable_swiglu_halves(gate_and_up, scale)


@register_kernel("swiglu", lambda gate: gate.new_empty(gate.shape))
def _swiglu(result: Tensor, gate: Tensor, up: Tensor, scale: Tensor | None) -> None:
    launch_gate_forward(SWIGLU, (gate, up, result), scale)


@register_kernel(
    "swiglu_backward",
    lambda grad, gate, up, scale: (
        gate.new_empty(gate.shape),
        up.new_empty(up.shape),
        allocate_scale_gradient(grad, scale),
    ),
)
def _swiglu_backward(
    grads: tuple[Tensor, Tensor, Tensor], grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor | None
) -> None:
    launch_gate_backward(SWIGLU, (grad, gate, up, *grads[:2]), scale, grads[2])


def _swiglu_halves(gate_and_up: Tensor, scale: Tensor | None) -> Tensor:
    gate, up = gate_and_up.chunk(2, -1)
    return _swiglu(gate, up, scale)


@register_kernel(
    "swiglu_halves_backward",
    lambda grad, gate_and_up, scale: (gate_and_up.new_empty(gate_and_up.shape), allocate_scale_gradient(grad, scale)),
)
def _swiglu_halves_backward(
    grads: tuple[Tensor, Tensor], grad: Tensor, gate_and_up: Tensor, scale: Tensor | None
) -> None:
    grad_both, grad_scale = grads
    launch_gate_backward(SWIGLU, (grad, *gate_and_up.chunk(2, -1), *grad_both.chunk(2, -1)), scale, grad_scale)


_differentiable_swiglu = make_differentiable(_swiglu, _swiglu_backward)
_differentiable_swiglu_halves = make_differentiable(_swiglu_halves, _swiglu_halves_backward)
