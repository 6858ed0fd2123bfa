"""gpt-oss's clamped SwiGLU in Triton, of the halves of a tensor, with or without a scale for each vector."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.costs import no_flops, no_scratch
from drawloom.kernels.operation import once_differentiable, register_kernel
from drawloom.kernels.triton.gate_kernels import CLAMPED, Gate, launch_backward, launch_forward
from drawloom.kernels.triton.primitives import check_floats


def oss_swiglu_halves_triton(both: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
    """
    Compute oss_swiglu_halves_eager for float32, bfloat16 and float16: both (..., 2 * width), scale (...,).

    Returns (..., width); the gradient of `both` is one tensor, without a concatenation.
    """
    check_floats("oss_swiglu_halves_triton", both)
    result: Tensor = _ClampedSwiGlu.apply(both, scale, alpha, limit)  # type: ignore[no-untyped-call]
    return result


class _ClampedSwiGlu(Function):
    """Clamped SwiGLU of two halves of a tensor, which it saves."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
        """Return (..., width) in the dtype of both (..., 2 * width); scale is (...)."""
        ctx.save_for_backward(both, scale)
        ctx.bounds = alpha, limit
        return _forward(both, scale, alpha, limit)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        grad_both, grad_scale = _backward(grad, *ctx.saved_tensors, *ctx.bounds)
        return grad_both, grad_scale if ctx.needs_input_grad[1] else None, None, None


def _allocate_forward(both: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
    return both.new_empty(*both.shape[:-1], both.shape[-1] // 2)


@register_kernel(
    "oss_swiglu_halves(Tensor both, Tensor? scale, float alpha, float limit) -> Tensor",
    fake=_allocate_forward,
    flops=no_flops,
    scratch=no_scratch,
)
def _forward(both: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
    result = _allocate_forward(both, scale, alpha, limit)
    launch_forward(Gate(CLAMPED, alpha, limit), (*both.chunk(2, -1), result), scale)
    return result


def _allocate_backward(
    grad: Tensor, both: Tensor, scale: Tensor | None, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both halves in one tensor, and of the scale (empty without a scale)."""
    return both.new_empty(both.shape), grad.new_empty(0) if scale is None else scale.new_empty(scale.shape)


@register_kernel(
    "oss_swiglu_halves_backward(Tensor grad, Tensor both, Tensor? scale, float alpha, float limit) -> (Tensor, Tensor)",
    fake=_allocate_backward,
    flops=no_flops,
    scratch=no_scratch,
)
def _backward(grad: Tensor, both: Tensor, scale: Tensor | None, alpha: float, limit: float) -> tuple[Tensor, Tensor]:
    grad_both, grad_scale = _allocate_backward(grad, both, scale, alpha, limit)
    tensors = (grad, *both.chunk(2, -1), *grad_both.chunk(2, -1))
    launch_backward(Gate(CLAMPED, alpha, limit), tensors, scale, grad_scale)
    return grad_both, grad_scale
