"""SwiGLU in Triton, of two tensors or of the halves of one, with or without a scale for each vector."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.costs import return_zero_flops, return_zero_scratch_bytes
from drawloom.kernels.operation import once_differentiable, register_kernel
from drawloom.kernels.triton.gate_kernels import SILU, Gate, launch_gate_backward, launch_gate_forward
from drawloom.kernels.triton.primitives import check_floats

SWIGLU = Gate(SILU)


def swiglu_triton(gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
    """Compute swiglu_eager for float32, bfloat16 and float16: gate and up (..., width), scale (...,)."""
    check_floats("swiglu_triton", gate, up)
    result: Tensor = _SwiGlu.apply(gate, up, scale)  # type: ignore[no-untyped-call]
    return result


def swiglu_halves_triton(gate_and_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """
    Compute swiglu_halves_eager for float32, bfloat16 and float16: gate_and_up (..., 2 * width), scale (...,).

    Returns (..., width); the gradient of `gate_and_up` is one tensor, without a concatenation.
    """
    check_floats("swiglu_halves_triton", gate_and_up)
    result: Tensor = _SwiGluHalves.apply(gate_and_up, scale)  # type: ignore[no-untyped-call]
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
    def forward(ctx: Any, gate_and_up: Tensor, scale: Tensor | None) -> Tensor:
        """Return (..., width) in the dtype of gate_and_up (..., 2 * width); scale is (...)."""
        ctx.save_for_backward(gate_and_up, scale)
        gate, up = gate_and_up.chunk(2, -1)
        return _forward(gate, up, scale)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        grad_both, grad_scale = _halves_backward(grad, *ctx.saved_tensors)
        return grad_both, grad_scale if ctx.needs_input_grad[1] else None


def _allocate_forward(gate: Tensor, up: Tensor, scale: Tensor | None) -> Tensor:
    return gate.new_empty(gate.shape)


@register_kernel(
    "swiglu(Tensor gate, Tensor up, Tensor? scale) -> Tensor",
    fake=_allocate_forward,
    flops=return_zero_flops,
    scratch=return_zero_scratch_bytes,
)
def _forward(gate: Tensor, up: Tensor, scale: Tensor | None) -> Tensor:
    result = _allocate_forward(gate, up, scale)
    launch_gate_forward(SWIGLU, (gate, up, result), scale)
    return result


def _allocate_backward(grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of gate, up, and the scale (empty without a scale)."""
    return gate.new_empty(gate.shape), up.new_empty(up.shape), _allocate_scale_gradient(grad, scale)


@register_kernel(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up, Tensor? scale) -> (Tensor, Tensor, Tensor)",
    fake=_allocate_backward,
    flops=return_zero_flops,
    scratch=return_zero_scratch_bytes,
)
def _backward(grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    results = _allocate_backward(grad, gate, up, scale)
    launch_gate_backward(SWIGLU, (grad, gate, up, *results[:2]), scale, results[2])
    return results


def _allocate_halves_backward(grad: Tensor, gate_and_up: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of both halves in one tensor, and of the scale (empty without a scale)."""
    return gate_and_up.new_empty(gate_and_up.shape), _allocate_scale_gradient(grad, scale)


@register_kernel(
    "swiglu_halves_backward(Tensor grad, Tensor gate_and_up, Tensor? scale) -> (Tensor, Tensor)",
    fake=_allocate_halves_backward,
    flops=return_zero_flops,
    scratch=return_zero_scratch_bytes,
)
def _halves_backward(grad: Tensor, gate_and_up: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    grad_both, grad_scale = _allocate_halves_backward(grad, gate_and_up, scale)
    launch_gate_backward(SWIGLU, (grad, *gate_and_up.chunk(2, -1), *grad_both.chunk(2, -1)), scale, grad_scale)
    return grad_both, grad_scale


def _allocate_scale_gradient(grad: Tensor, scale: Tensor | None) -> Tensor:
    return grad.new_empty(0) if scale is None else scale.new_empty(scale.shape)
