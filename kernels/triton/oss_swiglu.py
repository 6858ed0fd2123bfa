"""gpt-oss's clamped SwiGLU in Triton, of the halves of a tensor, with or without a scale for each vector."""

from torch import Tensor

from drawloom.kernels.operation import make_differentiable, register_kernel
from drawloom.kernels.triton.gate_kernels import (
    CLAMPED,
    Gate,
    allocate_scale_gradient,
    launch_gate_backward,
    launch_gate_forward,
)
from drawloom.kernels.triton.primitives import check_floats


def oss_swiglu_halves_triton(gate_and_up: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
    """
    Compute oss_swiglu_halves_eager for float32, bfloat16 and float16: gate_and_up (..., 2 * width), scale (...,).

    Returns (..., width); the gradient of `gate_and_up` is one tensor, without a concatenation.
    """
    check_floats("oss_swiglu_halves_triton", gate_and_up)
    return _differentiable_oss_swiglu(gate_and_up, scale, alpha, limit)  # type: ignore[no-any-return]


@register_kernel(
    "oss_swiglu_halves",
    lambda gate_and_up: gate_and_up.new_empty(*gate_and_up.shape[:-1], gate_and_up.shape[-1] // 2),
)
def _forward(result: Tensor, gate_and_up: Tensor, scale: Tensor | None, alpha: float, limit: float) -> None:
    launch_gate_forward(Gate(CLAMPED, alpha, limit), (*gate_and_up.chunk(2, -1), result), scale)


@register_kernel(
    "oss_swiglu_halves_backward",
    lambda grad, gate_and_up, scale: (gate_and_up.new_empty(gate_and_up.shape), allocate_scale_gradient(grad, scale)),
)
def _backward(
    grads: tuple[Tensor, Tensor],
    grad: Tensor,
    gate_and_up: Tensor,
    scale: Tensor | None,
    alpha: float,
    limit: float,
) -> None:
    grad_both, grad_scale = grads
    tensors = (grad, *gate_and_up.chunk(2, -1), *grad_both.chunk(2, -1))
    launch_gate_backward(Gate(CLAMPED, alpha, limit), tensors, scale, grad_scale)


_differentiable_oss_swiglu = make_differentiable(_forward, _backward)
