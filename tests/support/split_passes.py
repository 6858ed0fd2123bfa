"""Backward in one pass and in two, and a watch on the tensors they leave."""

import gc
import weakref
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from drawloom.components.pipeline.split_backward.split_backward import SplitBackward
from support.split_stages import STAGES, Ops, Parts, Stage, inputs_of

KINDS = [(name, ops) for name in STAGES for ops in get_args(Ops)]
Grads = list[Tensor | None]


def make_stage(name: str, ops: Ops) -> tuple[Stage, list[Any]]:
    """Return a stage and its inputs."""
    make, kinds = STAGES[name]
    return make(Parts(ops)), inputs_of(kinds)


def run_forward(stage: nn.Module, inputs: list[Any]) -> tuple[Any, ...]:
    """Return the outputs, with the same random numbers each time."""
    torch.manual_seed(1)
    return stage(*inputs)  # type: ignore[no-any-return]


def grads_for(outputs: tuple[Any, ...]) -> Grads:
    """Return a random gradient for each output that takes one."""
    torch.manual_seed(2)
    learns = [isinstance(output, Tensor) and output.requires_grad for output in outputs]
    return [
        torch.randn_like(output) if needs_grad else None for needs_grad, output in zip(learns, outputs, strict=True)
    ]


def pop_grads(tensors: list[Any]) -> Grads:
    """Return each tensor's `.grad`, and clear it."""
    grads = [tensor.grad if isinstance(tensor, Tensor) else None for tensor in tensors]
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            tensor.grad = None
    return grads


def have_no_grads(tensors: list[Any]) -> bool:
    """Whether no tensor has a `.grad`."""
    return not any(isinstance(tensor, Tensor) and tensor.grad is not None for tensor in tensors)


def go_backward(outputs: tuple[Any, ...], grads: Grads) -> None:
    """Run torch's own backward pass from the outputs with a gradient."""
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def compute_gradients_in_one_pass(stage: nn.Module, inputs: list[Any]) -> tuple[Grads, Grads]:
    """Return the gradients of inputs and parameters by torch's backward pass: the oracle."""
    outputs = run_forward(stage, inputs)
    go_backward(outputs, grads_for(outputs))
    return pop_grads(inputs), pop_grads(list(stage.parameters()))


def split_of(stage: nn.Module, inputs: list[Any]) -> tuple[SplitBackward, tuple[Any, ...]]:
    """Return a forward pass whose backward pass can be split, and its outputs."""
    split = SplitBackward()
    with split.forward_context():
        return split, run_forward(stage, inputs)


def compute_gradients_in_two_passes(stage: nn.Module, inputs: list[Any]) -> tuple[Grads, Grads]:
    """Return the same by two passes; the first may touch no `.grad`, and the second none of the inputs'."""
    split, outputs = split_of(stage, inputs)
    input_grads = split.backward_input(outputs, grads_for(outputs), inputs)
    assert have_no_grads([*inputs, *stage.parameters()])
    split.backward_weight()
    assert have_no_grads(inputs)
    return input_grads, pop_grads(list(stage.parameters()))


def assert_same_grads(first: tuple[Grads, Grads], second: tuple[Grads, Grads]) -> None:
    """Assert that all gradients are bitwise equal, or missing in both."""
    pairs = [pair for ours, expected in zip(first, second, strict=True) for pair in zip(ours, expected, strict=True)]
    assert [a is None for a, _ in pairs] == [b is None for _, b in pairs]
    assert all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)


PRODUCTS = ("mm", "addmm", "bmm", "grouped_gemm_rows_eager", "grouped_gemm_matrices_eager")


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A counter of matrix products; a product of all experts counts once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in PRODUCTS
        return func(*args, **kwargs or {})


class Mark:
    """An object with the lifetime of its holder."""


class Watch:
    """Tensors and graph nodes to be freed by their reference counts alone."""

    def __init__(self, stage: nn.Module) -> None:
        self._alive: list[weakref.ref[Any]] = []
        for module in stage.modules():
            if module is not stage:
                module.register_forward_hook(lambda _module, _inputs, output: self.add(output))

    def __enter__(self) -> "Watch":
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        gc.enable()

    def add(self, *tensors: Any) -> None:
        """Watch these too, beside the outputs of the stage's modules."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):
                self._alive.append(weakref.ref(tensor))
                if tensor.grad_fn is not None:
                    mark, metadata = Mark(), cast(dict[str, Any], tensor.grad_fn.metadata)
                    metadata["mark"] = mark
                    self._alive.append(weakref.ref(mark))

    def living(self) -> int:
        """Count the tensors and nodes still alive."""
        return sum(reference() is not None for reference in self._alive)
