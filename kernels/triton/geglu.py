"""GeGLU in Triton."""

from torch import Tensor

from drawloom.kernels.operation import make_differentiable, register_kernel
from drawloom.kernels.triton.gate_kernels import GELU_TANH, Gate, launch_gate_backward, launch_gate_forward
from drawloom.kernels.triton.primitives import check_floats

GEGLU = Gate(GELU_TANH)


def geglu_triton(gate: Tensor, up: Tensor) -> Tensor:
    """Compute geglu_eager for float32, bfloat16 and float16: gate and up (..., width)."""
    check_floats("geglu_triton", gate, up)
    return _differentiable_geglu(gate, up)


@register_kernel("geglu", lambda gate: gate.new_empty(gate.shape))
def _geglu(result: Tensor, gate: Tensor, up: Tensor) -> None:
    launch_gate_forward(GEGLU, (gate, up, result), None)


@register_kernel("geglu_backward", lambda gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
def _geglu_backward(grads: tuple[Tensor, Tensor], grad: Tensor, gate: Tensor, up: Tensor) -> None:
    launch_gate_backward(GEGLU, (grad, gate, up, *grads), None, grad.new_empty(0))


_differentiable_geglu = make_differentiable(_geglu, _geglu_backward)
