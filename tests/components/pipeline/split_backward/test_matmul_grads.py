"""Deferred gradients for torch's own matmuls, and nodes that can't be deferred."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from drawloom.components.pipeline.split_backward.matmul_grads import defer_and_return_other_leaves, find_node_users
from drawloom.components.pipeline.split_backward.split_backward import SplitBackward
from drawloom.kernels.deferral import Deferral
from drawloom.kernels.recompute.saved_tensors import KeptTensor, unpack
from support.split_passes import (
    assert_same_grads,
    compute_gradients_in_one_pass,
    compute_gradients_in_two_passes,
    pop_grads,
)
from support.split_stages import Ops, Parts, Stage, inputs_of, weight

Use = Callable[[Tensor, nn.Parameter], Tensor]


pytestmark = pytest.mark.usefixtures("float64")


PRODUCTS: dict[str, Use] = {
    "x @ w": lambda x, w: x @ w,
    "x @ w.T": lambda x, w: x @ w.t(),
    "w @ x": lambda x, w: w @ x,
    "w.T @ x": lambda x, w: w.t() @ x,
    "linear": lambda x, w: nn.functional.linear(x, w),
    "linear with bias": lambda x, w: nn.functional.linear(x, w, x[0]),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "twice": lambda x, w: (x @ w.t()).tanh() @ w,
    "one transpose twice": lambda x, w: (lambda t: (x @ t).tanh() @ t)(w.t()),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_weight_gradient_of_a_matmul_is_deferred(name: str) -> None:
    """On either side, transposed or not, the weight's gradient is left to the second pass."""
    x, w = torch.randn(4, 4, requires_grad=True), nn.Parameter(torch.randn(4, 4))
    y = PRODUCTS[name](x, w)
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, [x, w], grad)
    split = SplitBackward()
    y = PRODUCTS[name](x, w)
    assert defer_and_return_other_leaves(find_node_users([y], [x]), Deferral())[0] == []
    y = PRODUCTS[name](x, w)
    input_grads = split.backward_input([y], [grad], [x])
    split.backward_weight()
    torch.testing.assert_close([*input_grads, w.grad], [*expected])


OTHERS: dict[str, Use] = {
    "scaled addmm": lambda x, w: torch.addmm(x, x, w, alpha=2),
    "elementwise": lambda x, w: x * w,
    "weight that is computed": lambda x, w: x @ (w * 2),
    "batch": lambda x, w: torch.bmm(x.expand(2, 4, 4), w.expand(2, 4, 4)),
    "recomputed": lambda x, w: checkpoint(lambda x: (x @ w).tanh(), x, use_reentrant=False),
    "an output too": lambda x, w: x @ w + w,
    "nothing else leads through it": lambda x, w: x.detach() @ w,
    "by itself": lambda x, w: x * (w @ w),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_nodes_are_not_deferred(name: str) -> None:
    """Nodes other than a matmul with a weight, or with recomputed factors, are left to autograd."""
    x, w = torch.randn(4, 4, requires_grad=True), nn.Parameter(torch.randn(4, 4))
    leaves, handles = defer_and_return_other_leaves(find_node_users([OTHERS[name](x, w)], [x]), Deferral())
    assert leaves == [w]
    assert not handles


def test_complex_matmuls_are_not_deferred() -> None:
    """Products of complex numbers, whose gradients are conjugate, are left to autograd."""
    x = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
    w = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    assert defer_and_return_other_leaves(find_node_users([x @ w], [x]), Deferral())[0] == [w]


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "of one dimension": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 5)),
    "in groups, with strides": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), (2, 4, 7, 6)),
    "dilated, without a bias": (lambda: nn.Conv2d(4, 6, 2, dilation=2, bias=False), (2, 4, 5, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 3, 4)),
    "of three dimensions": (lambda: nn.Conv3d(4, 6, 2), (1, 4, 3, 3, 3)),
    "of one row": (lambda: nn.Conv1d(4, 6, 3), (4, 5)),
}


class Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of the gradients requested in a convolution's backward passes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.masks: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.masks.append(args[-1])
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_weight_gradient_of_a_convolution_is_deferred(name: str) -> None:
    """The first pass computes only the input's gradient, and the second the weight's and bias's, once."""
    make, shape = CONVOLUTIONS[name]
    layer, x = make(), torch.randn(shape, requires_grad=True)
    y = layer(x)
    grad, parameters = torch.randn_like(y), list(layer.parameters())
    expected = torch.autograd.grad(y, [x, *parameters], grad)
    split, y = SplitBackward(), layer(x)
    with Asked() as first:
        input_grads = split.backward_input([y], [grad], [x])
    with Asked() as second:
        split.backward_weight()
    bias = len(parameters) == 2
    assert (first.masks, second.masks) == ([[True, False, False]], [[False, True, bias]])
    torch.testing.assert_close([*input_grads, *(parameter.grad for parameter in parameters)], [*expected])


def test_a_convolution_whose_bias_cannot_wait_is_not_deferred() -> None:
    """A hook on the bias needs its gradient in the first pass, so the weight's would be computed twice."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 5, 5, requires_grad=True)
    assert layer.bias is not None
    layer.bias.register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
    leaves, handles = defer_and_return_other_leaves(find_node_users([layer(x)], [x]), Deferral())
    assert {*map(id, leaves)} == {*map(id, layer.parameters())}
    assert not handles


def test_the_bias_of_a_matmul_is_deferred_with_its_weight() -> None:
    """The first pass does not ask for the bias as a leaf, unless something else uses it, or it has a hook."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    assert defer_and_return_other_leaves(find_node_users([layer(x)], [x]), Deferral())[0] == []
    assert [*map(id, defer_and_return_other_leaves(find_node_users([layer(x) * layer.bias], [x]), Deferral())[0])] == [
        id(layer.bias)
    ]
    layer.bias.register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
    assert [*map(id, defer_and_return_other_leaves(find_node_users([layer(x)], [x]), Deferral())[0])] == [
        id(layer.bias)
    ]


@pytest.mark.parametrize("layer", [nn.Linear(6, 6, bias=False), nn.Conv1d(4, 4, 1, bias=False)])
def test_weights_that_autocast_casts_are_deferred(layer: nn.Module) -> None:
    """The first pass is asked for no weight, the second adds the cast of a bfloat16 product, as a full pass does."""
    layer = layer.float()

    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return s.layer(s.layer(x).tanh())  # type: ignore[no-any-return]  # one cast in two places

    stage, inputs = Stage(forward, layer=layer), [torch.randn(2, 4, 6, dtype=torch.float32, requires_grad=True)]
    assert defer_and_return_other_leaves(find_node_users(stage(*inputs), inputs), Deferral())[0] == []
    assert_same_grads(compute_gradients_in_two_passes(stage, inputs), compute_gradients_in_one_pass(stage, inputs))


def test_a_product_of_casts_of_weights_is_not_deferred() -> None:
    """If both factors are cast weights, a request for neither would not run the product's backward."""
    u, v = (nn.Parameter(torch.randn(4, 4, dtype=torch.float32)) for _ in range(2))
    x = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    y = x + u.bfloat16() @ v.bfloat16().t()
    assert {*map(id, defer_and_return_other_leaves(find_node_users([y], [x]), Deferral())[0])} == {id(u), id(v)}


Hooked = Callable[[Tensor, Callable[[Any], Any]], Any]


def double_grads(grads: Any) -> Any:
    """Return a gradient, or several, times two."""
    return tuple(None if grad is None else grad * 2 for grad in grads) if isinstance(grads, tuple) else grads * 2


HOOKS: dict[str, Hooked] = {
    "on the output": lambda y, hook: y.register_hook(hook),  # type: ignore[no-untyped-call]
    "before the node": lambda y, hook: y.grad_fn.register_prehook(hook),  # type: ignore[union-attr]
    "after the node": lambda y, hook: y.grad_fn.register_hook(lambda grads, _: hook(grads)),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("ops", get_args(Ops))
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_a_product_change_the_gradient_of_its_weight(name: str, ops: Ops) -> None:
    """A hook on a matmul changes the weight's gradient as it does the input's, and is called once."""
    p, called = Parts(ops), Counter[str]()

    def forward(s: Any, x: Tensor) -> Tensor:
        y = p.product(x.flatten(0, 1), s.w)
        HOOKS[name](y, lambda grads: (called.update([name]), double_grads(grads))[1])
        return y.tanh()

    stage, inputs = Stage(forward, w=weight()), inputs_of(["x"])
    expected = compute_gradients_in_one_pass(stage, inputs)
    assert_same_grads(compute_gradients_in_two_passes(stage, inputs), expected)
    assert called[name] == 2


MADE: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "transpose": lambda w: [w.t()],
    "cast": lambda w: [w.half()],
    "transposed cast": lambda w: [cast := w.half(), cast.t()],
    "cast of a transpose": lambda w: [transpose := w.t(), transpose.half()],
    "transpose of a transpose": lambda w: [transpose := w.t(), transpose.t()],
}
"""By name, what is made of a weight on the way to its product."""


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("at", [0, -1])
def test_hooks_on_tensors_computed_from_a_weight_are_called_once(name: str, at: int) -> None:
    """A hook on `w.t()` or a cast changes the weight's gradient, though only the second pass runs through it."""
    called = Counter[str]()

    def forward(s: Any, x: Tensor) -> Tensor:
        made = MADE[name](s.w)
        made[at].register_hook(lambda grad: (called.update([name]), grad * 2)[1])  # type: ignore[no-untyped-call]
        return (x.to(made[-1].dtype) @ made[-1]).tanh()

    stage, inputs = Stage(forward, w=weight()), inputs_of(["x"])
    expected = compute_gradients_in_one_pass(stage, inputs)
    assert_same_grads(compute_gradients_in_two_passes(stage, inputs), expected)
    assert called[name] == 2


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("saved_by_hooks", [False, True])
def test_gradients_of_tensors_computed_from_a_weight_are_complete(
    name: str, saved_by_hooks: bool, retained: bool
) -> None:
    """The weight and a tensor with a retained gradient equal a full pass, even if hooks hold the saved tensors."""
    kept: list[Tensor] = []

    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(KeptTensor, unpack) if saved_by_hooks else nullcontext():
            made = MADE[name](s.w)
            kept[:] = made if retained else []
            for tensor in kept:
                tensor.retain_grad()
            return (x.to(made[-1].dtype) @ made[-1]).tanh() @ s.w.to(made[-1].dtype)  # type: ignore[no-any-return]

    stage, inputs = Stage(forward, w=weight()), inputs_of(["x"])
    expected = compute_gradients_in_one_pass(stage, inputs), pop_grads(kept)
    split_grads = compute_gradients_in_two_passes(stage, inputs), pop_grads(kept)
    assert_same_grads(split_grads[0], expected[0])
    assert_same_grads((split_grads[1], []), (expected[1], []))


@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_has_the_bits_of_a_full_pass(bias: bool) -> None:
    """Split passes have the bits of a full pass in float32, though its bias's gradient has its own order."""
    layers = {name: nn.Conv2d(8, 8, 3, padding=1, bias=bias).float() for name in "ab"}
    stage = Stage(lambda s, x: s.b(s.a(x).relu()), **layers)
    inputs = [torch.randn(3, 8, 9, 9, dtype=torch.float32, requires_grad=True)]
    assert_same_grads(compute_gradients_in_two_passes(stage, inputs), compute_gradients_in_one_pass(stage, inputs))


def test_hooks_are_gone_after_the_first_pass() -> None:
    """A node that outlives the first pass has no hooks of ours, and no queued tensor."""
    x, w = torch.randn(4, 4, requires_grad=True), nn.Parameter(torch.randn(4, 4))
    y = x @ w
    node = y.grad_fn
    assert node is not None
    SplitBackward().backward_input([y], [torch.randn_like(y)], [x])
    handle = node.register_hook(lambda *_: None)
    assert list(handle.hooks_dict_ref() or ()) == [handle.id]
