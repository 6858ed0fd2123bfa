"""GeGLU in Triton."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.costs import return_zero_flops, return_zero_scratch_bytes
from drawloom.kernels.operation import once_differentiable, register_kernel
from drawloom.kernels.triton.gate_kernels import GELU_TANH, Gate, launch_gate_backward, launch_gate_forward
from drawloom.kernels.triton.primitives import check_floats

GEGLU = Gate(GELU_TANH)


def geglu_triton(gate: Tensor, up: Tensor) -> Tensor:
    """Compute geglu_eager for float32, bfloat16 and float16: gate and up (..., width)."""
    check_floats("geglu_triton", gate, up)
    result: Tensor = _GeGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


class _GeGlu(Function):
    """GeGLU that saves its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Return a tensor like gate, for gate and up (..., width) of one dtype."""
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _backward(grad, *ctx.saved_tensors)  # type: ignore[no-any-return]


def _allocate_forward(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@register_kernel(
    "geglu(Tensor gate, Tensor up) -> Tensor",
    fake=_allocate_forward,
    flops=return_zero_flops,
    scratch=return_zero_scratch_bytes,
)
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    result = _allocate_forward(gate, up)
    launch_gate_forward(GEGLU, (gate, up, result), None)
    return result


def _allocate_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of gate and up."""
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@register_kernel(
    "geglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    fake=_allocate_backward,
    flops=return_zero_flops,
    scratch=return_zero_scratch_bytes,
)
def _backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    results = _allocate_backward(grad, gate, up)
    launch_gate_backward(GEGLU, (grad, gate, up, *results), None, grad.new_empty(0))
    return results
