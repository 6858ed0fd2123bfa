"""The split backward equals the full backward, on every kind of stage, and defers weight gradients."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef

from drawloom.components.pipeline.split_backward.split_backward import SplitBackward
from drawloom.graph import UserError
from support.split_passes import (
    KINDS,
    Grads,
    Products,
    Watch,
    assert_same_grads,
    compute_gradients_in_one_pass,
    compute_gradients_in_two_passes,
    go_backward,
    grads_for,
    have_no_grads,
    make_stage,
    pop_grads,
    run_forward,
    split_of,
)
from support.split_stages import STAGES, Ops, Parts, Stage, inputs_of, re_entrant, weight

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "ops"), KINDS)
def test_split_backward_equals_full_backward(name: str, ops: Ops, dtype: torch.dtype) -> None:
    """Inputs and parameters get bitwise the gradients of a full backward pass."""
    torch.set_default_dtype(dtype)
    stage, inputs = make_stage(name, ops)
    assert_same_grads(compute_gradients_in_two_passes(stage, inputs), compute_gradients_in_one_pass(stage, inputs))


@pytest.mark.parametrize("ops", get_args(Ops))
def test_re_entrant_checkpoints_are_refused(ops: Ops) -> None:
    """A re-entrant checkpoint is refused with a remedy, and no gradient has changed."""
    stage, inputs = re_entrant(ops), inputs_of(["x"])
    split, outputs = split_of(stage, inputs)
    with pytest.raises(UserError, match="use_reentrant=False"):
        split.backward_input(outputs, grads_for(outputs), inputs)
    assert have_no_grads([*inputs, *stage.parameters()])


@pytest.mark.parametrize(("name", "ops"), KINDS)
def test_several_microbatches_can_be_pending(name: str, ops: Ops) -> None:
    """With three first passes before any second pass, parameters get the sum of the gradients."""
    stage, inputs = make_stage(name, ops)
    several = [inputs, *(inputs_of(STAGES[name][1]) for _ in range(2))]
    expected, input_grads, splits = [], [], []
    for microbatch in several:
        outputs = run_forward(stage, microbatch)
        go_backward(outputs, grads_for(outputs))
        expected += pop_grads(microbatch)
    sums = pop_grads(list(stage.parameters()))
    for microbatch in several:
        split, outputs = split_of(stage, microbatch)
        input_grads += split.backward_input(outputs, grads_for(outputs), microbatch)
        splits.append(split)
    for split in splits:
        split.backward_weight()
    assert_same_grads((input_grads, pop_grads(list(stage.parameters()))), (expected, sums))


def test_backward_in_another_thread_defers_too() -> None:
    """A backward pass in another thread, as on an accelerator, finds the deferral of the forward pass."""
    stage, inputs = make_stage("mlp", "ours")
    expected = compute_gradients_in_one_pass(stage, inputs)
    split, outputs = split_of(stage, inputs)
    input_grads: Grads = []
    grads = grads_for(outputs)
    thread = threading.Thread(target=lambda: input_grads.extend(split.backward_input(outputs, grads, inputs)))
    thread.start()
    thread.join()
    with Products() as products:
        split.backward_weight()
    assert_same_grads((input_grads, pop_grads(list(stage.parameters()))), expected)
    assert products.count == 2


@pytest.mark.parametrize(("name", "ops"), KINDS)
def test_a_recorded_graph_can_have_a_full_backward(name: str, ops: Ops) -> None:
    """Before its first pass, a recorded graph is an ordinary one."""
    stage, inputs = make_stage(name, ops)
    expected = compute_gradients_in_one_pass(stage, inputs)
    split = SplitBackward()
    with split.forward_context():
        assert_same_grads(compute_gradients_in_one_pass(stage, inputs), expected)


@pytest.mark.parametrize("ops", get_args(Ops))
def test_outputs_without_gradient_are_skipped(ops: Ops) -> None:
    """An output whose gradient is None contributes nothing; if all are None, there are no gradients."""
    stage, inputs = make_stage("two outputs", ops)
    _, second = run_forward(stage, inputs)
    grad = torch.randn_like(second)
    second.backward(grad)
    expected = pop_grads(inputs), pop_grads(list(stage.parameters()))
    split, outputs = split_of(stage, inputs)
    input_grads = split.backward_input(outputs, [None, grad], inputs)
    split.backward_weight()
    assert_same_grads((input_grads, pop_grads(list(stage.parameters()))), expected)
    split, outputs = split_of(stage, inputs)
    assert split.backward_input(outputs, [None, None], inputs) == [None]
    split.backward_weight()
    assert have_no_grads(list(stage.parameters()))


@pytest.mark.parametrize("ops", get_args(Ops))
def test_losses_need_no_gradient(ops: Ops) -> None:
    """Without output gradients, every output is a loss with gradient 1."""
    parts = Parts(ops)
    stage, inputs = Stage(lambda s, x: s.a(x).square().sum(), a=parts.linear()), inputs_of(["x"])
    stage(*inputs)[0].backward()
    expected = pop_grads(inputs), pop_grads(list(stage.parameters()))
    split, outputs = split_of(stage, inputs)
    input_grads = split.backward_input(outputs, None, inputs)
    split.backward_weight()
    assert_same_grads((input_grads, pop_grads(list(stage.parameters()))), expected)


def test_passes_out_of_order_are_an_error() -> None:
    """Each pass runs once, and backward_input comes first."""
    stage, inputs = make_stage("affine", "ours")
    split, outputs = split_of(stage, inputs)
    with pytest.raises(RuntimeError, match="after each backward_input"):
        split.backward_weight()
    split.backward_input(outputs, grads_for(outputs), inputs)
    with pytest.raises(RuntimeError, match="was already called"):
        split.backward_input(outputs, grads_for(outputs), inputs)
    split.backward_weight()
    with pytest.raises(RuntimeError, match="once after each"):
        split.backward_weight()


class Fails(Function):
    """The identity, whose backward pass raises an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("on the way back")


@pytest.mark.parametrize("ops", get_args(Ops))
def test_a_failed_first_pass_leaves_no_state(ops: Ops) -> None:
    """After an error, gradients and hooks are unchanged, nothing is queued, and the next pass is correct."""
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
        first_grad = weakref.ref(grads[0])
        with pytest.raises(ArithmeticError):
            split.backward_input(outputs, grads, inputs)
        del grads
        assert first_grad() is None
        assert have_no_grads([*inputs, *stage.parameters()])
        with pytest.raises(RuntimeError, match="after each backward_input"):
            split.backward_weight()
        del outputs
        assert not watch.living()
    failing.clear()
    expected = compute_gradients_in_one_pass(stage, inputs)
    hooked.clear()
    assert_same_grads(compute_gradients_in_two_passes(stage, inputs), expected)
    assert hooked == ["a"]


SPLIT_BY_TORCH = ["affine", "mlp", "residual", "norms", "convolutions", "dropout", "shared in series"]


@pytest.mark.parametrize("name", SPLIT_BY_TORCH)
def test_both_passes_equal_torch_where_torch_is_right(name: str) -> None:
    """Both passes give the gradients of torch.distributed.pipelining's split backward."""
    stage, inputs = make_stage(name, "torch")
    split_grads = compute_gradients_in_two_passes(stage, inputs)
    outputs = [
        output.clone() for output in run_forward(stage, inputs)
    ]  # torch detaches them in place, which views forbid
    (grad,) = grads_for(tuple(outputs))
    assert grad is not None
    grads, groups = stage_backward_input(outputs, [grad], inputs, stage.parameters())
    pop_grads(inputs)
    stage_backward_weight(stage.parameters(), groups)
    expected = list(grads), pop_grads(list(stage.parameters()))
    for one, other in zip([*split_grads[0], *split_grads[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_an_input_may_be_used_as_a_weight() -> None:
    """A leaf among the inputs gets its whole gradient in the first pass, also as a weight in our kernels."""
    stage, _ = make_stage("shared in series", "ours")
    inputs = [stage.w]
    grad = torch.randn(6, 6)
    stage(*inputs)[0].backward(grad)
    expected = pop_grads(inputs)
    split, outputs = split_of(stage, inputs)
    torch.testing.assert_close(split.backward_input(outputs, [grad], inputs), expected)
    split.backward_weight()
    assert have_no_grads(inputs)


@pytest.mark.parametrize("ops", get_args(Ops))
def test_leaves_outside_of_modules_get_gradients(ops: Ops) -> None:
    """Leaves outside of modules, such as the loss's, get a full pass's gradients."""
    product = Parts(ops).product
    known, vector, matrix = nn.Parameter(torch.randn(6, 6)), *(torch.randn(*shape) for shape in ((6,), (6, 6)))
    leaves: list[Any] = [known, vector.requires_grad_(), matrix.requires_grad_()]
    stage = Stage(lambda s, x: (product(product(x * vector, s.w) * vector, matrix) - vector).square().sum(), w=known)
    inputs = inputs_of(["x"])
    stage(*inputs)[0].backward()
    expected = pop_grads(inputs), pop_grads(leaves)
    split, outputs = split_of(stage, inputs)
    input_grads = split.backward_input(outputs, None, inputs)
    assert have_no_grads(leaves)
    split.backward_weight()
    assert_same_grads((input_grads, pop_grads(leaves)), expected)


@pytest.mark.parametrize("ops", get_args(Ops))
def test_each_microbatch_can_use_other_weights(ops: Ops) -> None:
    """Leaves are searched in every microbatch's graph, whatever leaves earlier graphs had."""
    product = Parts(ops).product
    ways = [torch.randn(6, 6, requires_grad=True), torch.randn(6, requires_grad=True)]
    stage = Stage(lambda s, x, n: product(product(x, ways[0]) if n == 0 else x * ways[1], s.w), w=weight())
    leaves = [stage.w, *ways]
    several = [[*inputs_of(["x"]), number] for number in (0, 1, 0)]
    expected, input_grads, splits = [], [], []
    for microbatch in several:
        outputs = stage(*microbatch)
        go_backward(outputs, grads_for(outputs))
        expected += pop_grads(microbatch[:1])
    sums = pop_grads(leaves)
    for microbatch in several:
        split, outputs = split_of(stage, microbatch)
        input_grads += split.backward_input(outputs, grads_for(outputs), microbatch[:1])
        splits.append(split)
    for split in splits:
        split.backward_weight()
    assert_same_grads((input_grads, pop_grads(leaves)), (expected, sums))


@pytest.mark.parametrize(("name", "ops"), KINDS)
def test_retained_gradients_of_activations_equal_a_full_pass(name: str, ops: Ops) -> None:
    """`retain_grad` keeps the gradients of a full pass, available after the first pass."""
    stage, inputs = make_stage(name, ops)
    kept: list[Tensor] = []

    def keep(*arguments: Any) -> None:
        output = arguments[-1]
        if output.requires_grad and not output.is_leaf:
            output.retain_grad()
            kept.append(output)

    for module in stage.children():
        module.register_forward_hook(keep)
    outputs = run_forward(stage, inputs)
    keep(outputs[0])
    go_backward(outputs, grads_for(outputs))
    expected = pop_grads(kept)
    kept.clear()
    split, outputs = split_of(stage, inputs)
    keep(outputs[0])
    split.backward_input(outputs, grads_for(outputs), inputs)
    split.backward_weight()
    assert_same_grads((pop_grads(kept), []), (expected, []))


@pytest.mark.parametrize("ops", get_args(Ops))
@pytest.mark.parametrize("name", ["mlp", "convolutions", "two parameters at one node", "shared in series"])
def test_a_multi_grad_hook_over_weights_is_called_once(name: str, ops: Ops) -> None:
    """A multi-grad hook over weights is called once with all gradients, as by a full pass."""
    stage, inputs = make_stage(name, ops)
    seen: list[Any] = []
    register_multi_grad_hook([*stage.parameters()], lambda grads: seen.append([*grads]))
    expected = compute_gradients_in_one_pass(stage, inputs)
    assert_same_grads(compute_gradients_in_two_passes(stage, inputs), expected)
    once, again = seen
    assert_same_grads((again, []), (once, []))


@pytest.mark.parametrize("ops", get_args(Ops))
def test_a_hook_over_weights_and_activations_is_refused(ops: Ops) -> None:
    """A multi-grad hook over weights and activations would be called in both passes, and is an error."""
    stage, inputs = make_stage("mlp", ops)
    register_multi_grad_hook([*stage.parameters(), *inputs], lambda grads: None)
    split, outputs = split_of(stage, inputs)
    with pytest.raises(UserError, match="one for the activations and one for the weights"):
        split.backward_input(outputs, grads_for(outputs), inputs)
    assert have_no_grads([*inputs, *stage.parameters()])


class InPlace(Function):
    """The identity, whose backward pass triples the gradient in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mul_(3)


CHANGED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "of a product": lambda s, x: InPlace.apply(x) + s.a(x),  # type: ignore[no-untyped-call]
    "of a bias": lambda s, x: s.a(x).tanh() + (InPlace.apply(x) + s.bias),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("ops", get_args(Ops))
@pytest.mark.parametrize("name", CHANGED)
def test_changing_a_queued_gradient_in_place_is_an_error(name: str, ops: Ops) -> None:
    """If a custom backward changes a queued gradient in place, the second pass raises an error."""
    stage = Stage(CHANGED[name], a=Parts(ops).linear(bias=False), bias=weight(2, 4, 6))
    inputs = inputs_of(["x"])
    split, outputs = split_of(stage, inputs)
    split.backward_input(outputs, grads_for(outputs), inputs)
    with pytest.raises(UserError, match=r"changed in place.*`grad \* 2`, not `grad.mul_\(2\)`"):
        split.backward_weight()


@pytest.mark.parametrize("ops", get_args(Ops))
def test_changing_a_queued_activation_in_place_is_an_error(ops: Ops) -> None:
    """A stage that overwrites its activations for the next microbatch can't have a split backward."""
    stage, inputs = make_stage("mlp", ops)
    buffer = torch.randn(2, 4, 6)
    inputs[0] = buffer.detach().requires_grad_()
    split, outputs = split_of(stage, inputs)
    split.backward_input(outputs, grads_for(outputs), inputs)
    buffer.copy_(torch.randn(2, 4, 6))
    with pytest.raises(UserError, match=r"float64 \(.*6\) was changed in place before .* of a weight float64 \("):
        split.backward_weight()


@pytest.mark.parametrize("ops", get_args(Ops))
def test_a_gradient_can_be_changed_in_place_before_it_is_queued(ops: Ops) -> None:
    """A gradient changed in place before it is queued, or not queued at all, gives the full pass's result."""
    linears = {name: Parts(ops).linear() for name in "ab"}
    stage = Stage(lambda s, x: InPlace.apply(s.b(InPlace.apply(s.a(x)))), **linears)  # type: ignore[no-untyped-call]
    inputs = inputs_of(["x"])
    assert_same_grads(compute_gradients_in_two_passes(stage, inputs), compute_gradients_in_one_pass(stage, inputs))


def test_a_stage_without_tokens_gives_zero_gradients() -> None:
    """A stage without tokens gives its weights zero gradients."""
    stage, _ = make_stage("mlp", "ours")
    x = torch.randn(0, 4, 6, requires_grad=True)
    input_grads, grads = compute_gradients_in_two_passes(stage, [x])
    assert [grad.shape for grad in input_grads if grad is not None] == [x.shape]
    assert all(grad is not None and not grad.any() for grad in grads)


STEPS = ("product", "product", "scale", "shift", "tanh", "add", "halves", "product of weights", "without x")


@hypothesis.settings(derandomize=True)
@hypothesis.given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=9),
    trained=st.lists(st.booleans(), min_size=6, max_size=6),
    outputs=st.integers(1, 2),
    learns=st.booleans(),
)
@hypothesis.example(
    [("product", 0, 1, True), ("product", 1, 1, False)], [False, True, False, True, False, False], 1, True
)
def test_any_graph_equals_a_full_pass(
    steps: list[tuple[str, int, int, bool]], trained: list[bool], outputs: int, learns: bool
) -> None:
    """Weights may be shared, multiplied, frozen, and used by our kernels and torch's."""
    x = torch.randn(3, 4, requires_grad=learns)
    weights = {f"w{n}": nn.Parameter(torch.randn(4, 4), trained[n]) for n in range(4)}
    vectors = {f"v{n}": nn.Parameter(torch.randn(4), trained[n + 4]) for n in range(2)}

    def forward(s: Any, x: Tensor) -> tuple[Tensor, ...]:
        tensors = [x]
        for step, i, j, ours in steps:
            one, other = tensors[i % len(tensors)], tensors[j % len(tensors)]
            weight, vector = getattr(s, f"w{j % 4}"), getattr(s, f"v{j % 2}")
            product = Parts("ours" if ours else "torch").product
            match step:
                case "product":
                    tensors.append(product(one, weight))
                case "scale":
                    tensors.append(one * vector)
                case "shift":
                    tensors.append(one + vector)
                case "tanh":
                    tensors.append(one.tanh())
                case "add":
                    tensors.append(one + other)
                case "halves":
                    left, right = one.chunk(2, -1)
                    tensors.append(torch.cat([right, left * right], -1))
                case "product of weights":
                    tensors.append(product(one, getattr(s, f"w{i % 4}") @ weight))
                case "without x":
                    tensors.append(product(torch.ones(3, 4), weight))
        return tuple(tensors[-outputs:])

    stage = Stage(forward, **weights, **vectors)
    for split_grads, expected in zip(
        compute_gradients_in_two_passes(stage, [x]), compute_gradients_in_one_pass(stage, [x]), strict=True
    ):
        assert [grad is None for grad in split_grads] == [grad is None for grad in expected]
        torch.testing.assert_close(split_grads, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ops", get_args(Ops))
def test_the_first_pass_frees_tensors_weights_do_not_need(ops: Ops) -> None:
    """gate and up are freed with the first pass; their product, an input of `down`, lives until the second."""
    p = Parts(ops)
    stage = Stage(lambda s, x: s.down(F.silu(s.gate(x)) * s.up(x)), gate=p.linear(), up=p.linear(), down=p.linear())
    (x,) = inputs_of(["x"])
    storages: dict[str, StorageWeakRef] = {}

    def note(name: str, tensor: Tensor) -> None:
        storages[name] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def list_expired() -> dict[str, bool]:
        return {name: storage.expired() for name, storage in storages.items()}  # type: ignore[no-untyped-call]

    stage.get_submodule("gate").register_forward_hook(lambda _module, _inputs, output: note("gate", output))
    stage.get_submodule("up").register_forward_hook(lambda _module, _inputs, output: note("up", output))
    stage.get_submodule("down").register_forward_hook(lambda _module, inputs, _output: note("product", inputs[0]))
    split, outputs = split_of(stage, [x])
    assert not any(list_expired().values())
    split.backward_input(outputs, grads_for(outputs), [x])
    assert list_expired() == {"gate": True, "up": True, "product": False}
    split.backward_weight()
    assert list_expired()["product"]


@pytest.mark.parametrize("ops", get_args(Ops))
@pytest.mark.parametrize("name", ["mlp", "transformer block", "tied around another", "recomputed", "rerun"])
def test_the_first_pass_frees_the_graph(name: str, ops: Ops) -> None:
    """The queue for the second pass holds data, and no autograd node."""
    stage, inputs = make_stage(name, ops)
    compute_gradients_in_one_pass(stage, inputs)  # the first recomputation of a process leaves frames behind
    with Watch(stage) as watch:
        split, outputs = split_of(stage, inputs)
        watch.add(*outputs)
        split.backward_input(outputs, grads_for(outputs), inputs)
        del outputs
        assert not watch.living()
        split.backward_weight()


@pytest.mark.parametrize("name", ["recomputed", "rerun"])
@pytest.mark.parametrize("ops", get_args(Ops))
def test_a_checkpoint_is_recomputed_once(ops: Ops, name: str) -> None:
    """A checkpointed region runs once forward and once for both passes."""
    stage, inputs = make_stage(name, ops)
    runs: Counter[str] = Counter()
    for name, module in stage.named_children():
        module.register_forward_hook(lambda *_, name=name: runs.update([name]))
    compute_gradients_in_two_passes(stage, inputs)
    assert runs == {"a": 2, "b": 2, "c": 1}


PUT_OFF = {
    "mlp": 2,
    "transformer block": 4,
    "alternating": 4,
    "shared in series": 2,
    "frozen": 2,
    "somebody else's function": 1,
    "recomputed": 3,
    "rerun": 3,
    "block that is rerun": 4,
}
"""The number of uses of weights that are left to the second pass."""


@pytest.mark.parametrize("ops", get_args(Ops))
@pytest.mark.parametrize("name", PUT_OFF)
def test_no_matmul_is_computed_twice(name: str, ops: Ops) -> None:
    """Both passes together compute as many matmuls as a full pass; the second has one per use of a weight."""
    stage, inputs = make_stage(name, ops)
    outputs = run_forward(stage, inputs)
    with Products() as whole:
        torch.autograd.backward(outputs, grads_for(outputs))
    split, outputs = split_of(stage, inputs)
    with Products() as first:
        split.backward_input(outputs, grads_for(outputs), inputs)
    with Products() as second:
        split.backward_weight()
    assert first.count + second.count == whole.count
    assert second.count == (1 if (name, ops) == ("recomputed", "torch") else PUT_OFF[name])


@pytest.mark.parametrize("ops", get_args(Ops))
def test_weights_of_the_first_stage_are_deferred(ops: Ops) -> None:
    """Without an input that needs a gradient, all weight gradients but a first torch operation's are deferred."""
    stage, inputs = make_stage("input without gradient", ops)
    split, outputs = split_of(stage, inputs)
    with Products() as first:
        split.backward_input(outputs, grads_for(outputs), inputs)
    with Products() as second:
        split.backward_weight()
    assert (first.count, second.count) == ((1, 2) if ops == "ours" else (2, 1))


def put_off(stage: Stage) -> list[str]:
    """Return the parameters whose gradients are computed in the second pass alone, by its matmuls."""
    inputs = inputs_of(["x"])
    split, outputs = split_of(stage, inputs)
    split.backward_input(outputs, grads_for(outputs), inputs)
    with Products() as products:
        split.backward_weight()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in stage.parameters())
    names = [name for name, parameter in stage.named_parameters() if parameter.grad is not None and parameter.ndim > 1]
    stage.zero_grad()
    assert products.count == len(names)
    return names


@pytest.mark.parametrize("ops", get_args(Ops))
def test_weights_can_be_frozen_and_unfrozen_between_steps(ops: Ops) -> None:
    """Microbatches compute gradients for the weights trainable at their time."""
    p = Parts(ops)
    stage = Stage(lambda s, x: s.b(s.a(x).tanh()), a=p.linear(), b=p.linear())
    stage.a.requires_grad_(False)
    assert put_off(stage) == ["b.weight"]
    stage.a.requires_grad_(True)
    assert put_off(stage) == ["a.weight", "b.weight"]
    stage.b.requires_grad_(False)
    assert put_off(stage) == ["a.weight"]
