"""Two backward passes give what one gives, on every kind of stage."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any, get_args

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from drawloom.components.pipeline.split_backward.plan import StageWeights
from drawloom.components.pipeline.split_backward.split_backward import SplitBackward
from drawloom.graph import UserError
from support.split_passes import (
    KINDS,
    Grads,
    Products,
    Watch,
    go_backward,
    grads_for,
    in_one,
    in_two,
    made,
    ran,
    same,
    split_of,
    taken,
    untouched,
)
from support.split_stages import STAGES, Ops, Parts, Stage, inputs_of, re_entrant


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Everything is computed in float64, unless a test says otherwise."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "ops"), KINDS)
def test_two_passes_give_what_one_gives(name: str, ops: Ops, dtype: torch.dtype) -> None:
    """Inputs and parameters get bitwise the gradients of a full backward pass."""
    torch.set_default_dtype(dtype)
    stage, inputs = made(name, ops)
    same(in_two(stage, inputs), in_one(stage, inputs))


@pytest.mark.parametrize("ops", get_args(Ops))
def test_re_entrant_checkpoints_are_refused(ops: Ops) -> None:
    """What torch can't split is refused in our words, and nothing has changed."""
    stage, inputs = re_entrant(ops), inputs_of(["x"])
    split, outputs = split_of(stage, inputs)
    with pytest.raises(UserError, match="use_reentrant=False"):
        split.backward_input(outputs, grads_for(outputs), inputs)
    assert untouched([*inputs, *stage.parameters()])


@pytest.mark.parametrize(("name", "ops"), KINDS)
def test_microbatches_may_wait(name: str, ops: Ops) -> None:
    """Three microbatches go through the first pass before any goes through the second: parameters get their sums."""
    stage, inputs = made(name, ops)
    several = [inputs, *(inputs_of(STAGES[name][1]) for _ in range(2))]
    expected, found, splits = [], [], []
    for each in several:
        outputs = ran(stage, each)
        go_backward(outputs, grads_for(outputs))
        expected += taken(each)
    sums = taken(list(stage.parameters()))
    for each in several:
        split, outputs = split_of(stage, each)
        found += split.backward_input(outputs, grads_for(outputs), each)
        splits.append(split)
    for split in splits:
        split.backward_weight()
    same((found, taken(list(stage.parameters()))), (expected, sums))


def test_another_thread_may_go_backward() -> None:
    """Autograd's own threads, on an accelerator, find what is put off as the calling thread does."""
    stage, inputs = made("mlp", "ours")
    expected = in_one(stage, inputs)
    split, outputs = split_of(stage, inputs)
    found: Grads = []
    grads = grads_for(outputs)
    thread = threading.Thread(target=lambda: found.extend(split.backward_input(outputs, grads, inputs)))
    thread.start()
    thread.join()
    with Products() as products:
        split.backward_weight()
    same((found, taken(list(stage.parameters()))), expected)
    assert products.count == 2


@pytest.mark.parametrize(("name", "ops"), KINDS)
def test_what_was_recorded_may_go_backward_as_a_whole(name: str, ops: Ops) -> None:
    """Until its first pass, a recorded graph is an ordinary one."""
    stage, inputs = made(name, ops)
    expected = in_one(stage, inputs)
    split = SplitBackward(StageWeights.of(stage.parameters()))
    with split.forward():
        same(in_one(stage, inputs), expected)


@pytest.mark.parametrize("ops", get_args(Ops))
def test_some_outputs_without_gradient(ops: Ops) -> None:
    """An output that nobody asked for counts for nothing; if none is asked for, nothing has a gradient."""
    stage, inputs = made("two outputs", ops)
    _, second = ran(stage, inputs)
    grad = torch.randn_like(second)
    second.backward(grad)
    expected = taken(inputs), taken(list(stage.parameters()))
    split, outputs = split_of(stage, inputs)
    found = split.backward_input(outputs, [None, grad], inputs)
    split.backward_weight()
    same((found, taken(list(stage.parameters()))), expected)
    split, outputs = split_of(stage, inputs)
    assert split.backward_input(outputs, [None, None], inputs) == [None]
    split.backward_weight()
    assert untouched(list(stage.parameters()))


@pytest.mark.parametrize("ops", get_args(Ops))
def test_losses_need_no_gradient(ops: Ops) -> None:
    """The last stage gives its loss alone."""
    parts = Parts(ops)
    stage, inputs = Stage(lambda s, x: s.a(x).square().sum(), a=parts.linear()), inputs_of(["x"])
    stage(*inputs)[0].backward()
    expected = taken(inputs), taken(list(stage.parameters()))
    split, outputs = split_of(stage, inputs)
    found = split.backward_input(outputs, None, inputs)
    split.backward_weight()
    same((found, taken(list(stage.parameters()))), expected)


def test_the_passes_come_in_order() -> None:
    """Each pass runs once, the one for the inputs first."""
    stage, inputs = made("affine", "ours")
    split, outputs = split_of(stage, inputs)
    with pytest.raises(RuntimeError, match="after backward_input"):
        split.backward_weight()
    split.backward_input(outputs, grads_for(outputs), inputs)
    with pytest.raises(RuntimeError, match="already"):
        split.backward_input(outputs, grads_for(outputs), inputs)
    split.backward_weight()
    with pytest.raises(RuntimeError, match="once"):
        split.backward_weight()


class Fails(Function):
    """Gives its input back, and fails on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("on the way back")


@pytest.mark.parametrize("ops", get_args(Ops))
def test_a_first_pass_that_fails_leaves_nothing(ops: Ops) -> None:
    """Gradients are untouched, hooks are in place, nothing waits, and the next pass is right."""
    p = Parts(ops)
    failing = [True]
    stage = Stage(lambda s, x: s.b((Fails.apply if failing else Tensor.clone)(s.a(x))), a=p.linear(), b=p.linear())
    inputs = inputs_of(["x"])
    hooked: list[str] = []
    stage.get_parameter("a.bias").register_hook(lambda _: hooked.append("a"))  # type: ignore[no-untyped-call]
    with Watch(stage) as watch:
        split, outputs = split_of(stage, inputs)
        watch.add(*outputs)
        grads = grads_for(outputs)
        held = weakref.ref(grads[0])
        with pytest.raises(ArithmeticError):
            split.backward_input(outputs, grads, inputs)
        del grads
        assert held() is None
        assert untouched([*inputs, *stage.parameters()])
        with pytest.raises(RuntimeError, match="after backward_input"):
            split.backward_weight()
        del outputs
        assert not watch.living()
    failing.clear()
    expected = in_one(stage, inputs)
    hooked.clear()
    same(in_two(stage, inputs), expected)
    assert hooked == ["a"]


SPLIT_BY_TORCH = ["affine", "mlp", "residual", "norms", "convolutions", "dropout", "shared in series"]


@pytest.mark.parametrize("name", SPLIT_BY_TORCH)
def test_equals_torch_where_torch_is_right(name: str) -> None:
    """Two passes give what torch.distributed.pipelining's two give."""
    stage, inputs = made(name, "torch")
    found = in_two(stage, inputs)
    outputs = [output.clone() for output in ran(stage, inputs)]  # torch detaches them in place, which views forbid
    (grad,) = grads_for(tuple(outputs))
    assert grad is not None
    grads, groups = stage_backward_input(outputs, [grad], inputs, stage.parameters())
    taken(inputs)
    stage_backward_weight(stage.parameters(), groups)
    expected = list(grads), taken(list(stage.parameters()))
    for one, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_a_parameter_that_is_an_input_too() -> None:
    """It gets its whole gradient both ways, as it does by a full pass."""
    stage, _ = made("shared in series", "ours")
    inputs = [stage.w]
    grad = torch.randn(6, 6)
    stage(*inputs)[0].backward(grad)
    expected = taken(inputs)
    split, outputs = split_of(stage, inputs)
    found = split.backward_input(outputs, [grad], inputs)
    split.backward_weight()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(taken(inputs), expected)


def test_no_rows() -> None:
    """A stage that gets no tokens gives its weights gradients of zero."""
    stage, _ = made("mlp", "ours")
    x = torch.randn(0, 4, 6, requires_grad=True)
    found, grads = in_two(stage, [x])
    assert [grad.shape for grad in found if grad is not None] == [x.shape]
    assert all(grad is not None and not grad.any() for grad in grads)


STEPS = ("product", "product", "scale", "shift", "tanh", "add", "halves", "product of weights", "without x")


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=9),
    trained=st.lists(st.booleans(), min_size=6, max_size=6),
    outputs=st.integers(1, 2),
    learns=st.booleans(),
)
@hypothesis.example(
    [("product", 0, 1, True), ("product", 1, 1, False)], [False, True, False, True, False, False], 1, True
)
def test_any_graph(steps: list[tuple[str, int, int, bool]], trained: list[bool], outputs: int, learns: bool) -> None:
    """Weights may be shared, multiplied, frozen and mixed with ours and torch's operations in any way."""
    x = torch.randn(3, 4, requires_grad=learns)
    weights = {f"w{n}": nn.Parameter(torch.randn(4, 4), trained[n]) for n in range(4)}
    vectors = {f"v{n}": nn.Parameter(torch.randn(4), trained[n + 4]) for n in range(2)}

    def forward(s: Any, x: Tensor) -> tuple[Tensor, ...]:
        made = [x]
        for step, i, j, ours in steps:
            one, other = made[i % len(made)], made[j % len(made)]
            weight, vector = getattr(s, f"w{j % 4}"), getattr(s, f"v{j % 2}")
            product = Parts("ours" if ours else "torch").product
            match step:
                case "product":
                    made.append(product(one, weight))
                case "scale":
                    made.append(one * vector)
                case "shift":
                    made.append(one + vector)
                case "tanh":
                    made.append(one.tanh())
                case "add":
                    made.append(one + other)
                case "halves":
                    left, right = one.chunk(2, -1)
                    made.append(torch.cat([right, left * right], -1))
                case "product of weights":
                    made.append(product(one, getattr(s, f"w{i % 4}") @ weight))
                case "without x":
                    made.append(product(torch.ones(3, 4), weight))
        return tuple(made[-outputs:])

    stage = Stage(forward, **weights, **vectors)
    for found, expected in zip(in_two(stage, [x]), in_one(stage, [x]), strict=True):
        assert [grad is None for grad in found] == [grad is None for grad in expected]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
