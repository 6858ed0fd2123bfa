"""WeightGrads adds gradients once, calls all hooks, and releases everything afterwards."""

import weakref
from collections import Counter
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from drawloom.components.pipeline.split_backward import split_backward
from drawloom.components.pipeline.split_backward.split_backward import SplitBackward
from drawloom.kernels.deferral import DeferredGrad
from support.split_passes import (
    KINDS,
    Watch,
    assert_same_grads,
    compute_gradients_in_one_pass,
    compute_gradients_in_two_passes,
    go_backward,
    grads_for,
    make_stage,
    pop_grads,
    run_forward,
    split_of,
)
from support.split_stages import Ops

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(("name", "ops"), KINDS)
def test_hooks_are_called_once_and_in_the_second_pass(name: str, ops: Ops) -> None:
    """Hooks of a parameter see its whole gradient, may change it, and are called as often as by a full pass."""
    stage, inputs = make_stage(name, ops)
    called: Counter[str] = Counter()

    def hook(name: str, parameter: nn.Parameter) -> None:
        parameter.register_hook(lambda grad: (called.update([name]), grad * 2)[1])  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(lambda _: called.update([name + " added"]))  # type: ignore[no-untyped-call]

    for parameter_name, parameter in stage.named_parameters():
        if parameter.requires_grad:
            hook(parameter_name, parameter)
    expected = compute_gradients_in_one_pass(stage, inputs)
    once = called.copy()
    called.clear()
    split, outputs = split_of(stage, inputs)
    input_grads = split.backward_input(outputs, grads_for(outputs), inputs)
    assert not called
    split.backward_weight()
    assert_same_grads((input_grads, pop_grads(list(stage.parameters()))), expected)
    assert called == once
    assert set(once.values()) <= {1}


@pytest.mark.parametrize(("name", "ops"), KINDS)
def test_nothing_outlives_the_second_pass(name: str, ops: Ops) -> None:
    """After it no tensor and no autograd node is alive, though the SplitBackward is, and no reference cycle is left."""
    stage, inputs = make_stage(name, ops)
    compute_gradients_in_one_pass(stage, inputs)  # the first recomputation of a process leaves frames behind
    with Watch(stage) as watch:
        split, outputs = split_of(stage, inputs)
        grads = grads_for(outputs)
        input_grads = split.backward_input(outputs, grads, inputs)
        watch.add(*outputs, *inputs, *grads, *input_grads)
        assert watch.living()
        del outputs, inputs, grads, input_grads
        split.backward_weight()
        assert not watch.living()


@pytest.mark.parametrize("ops", get_args(Ops))
@pytest.mark.parametrize("name", ["transformer block", "convolutions"])
def test_a_failed_second_pass_leaves_no_state(name: str, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a hook raises an error, remaining gradients are dropped at once, and the next pair of passes is correct."""
    monkeypatch.setattr(split_backward, "CHUNK_BYTES", 1)
    stage, inputs = make_stage(name, ops)
    expected = compute_gradients_in_one_pass(stage, inputs)

    def fail(_: Tensor) -> None:
        raise ArithmeticError("in a hook")

    handles = [parameter.register_post_accumulate_grad_hook(fail) for parameter in stage.parameters()]  # type: ignore[no-untyped-call]
    with Watch(stage) as watch:
        split, outputs = split_of(stage, inputs)
        watch.add(*outputs)
        grads = grads_for(outputs)
        split.backward_input(outputs, grads, inputs)
        first_grad = weakref.ref(grads[0])
        del grads
        with pytest.raises(ArithmeticError):
            split.backward_weight()
        assert first_grad() is None
        del outputs
        assert not watch.living()
    for handle in handles:
        handle.remove()
    stage.zero_grad()
    assert_same_grads(compute_gradients_in_two_passes(stage, inputs), expected)


@pytest.mark.parametrize("at_once", [1, 300, 2**30])
def test_gradients_are_computed_in_chunks(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are computed in chunks of CHUNK_BYTES, once per weight, and no weight is split."""
    monkeypatch.setattr(split_backward, "CHUNK_BYTES", at_once)
    stage, inputs = make_stage("transformer block", "ours")
    expected = compute_gradients_in_one_pass(stage, inputs)
    split, outputs = split_of(stage, inputs)
    input_grads = split.backward_input(outputs, grads_for(outputs), inputs)
    computed: list[int] = []
    most: list[int] = []

    def check_chunk(parameter: Tensor) -> None:
        most.append(len(computed))
        computed.clear()

    compute = DeferredGrad.drain_and_return_remaining_grad

    def count_and_compute(deferred: DeferredGrad) -> Tensor | None:
        computed.extend([1] * (deferred.weight.ndim > 1))  # those of vectors have been computed before
        return compute(deferred)

    monkeypatch.setattr(DeferredGrad, "drain_and_return_remaining_grad", count_and_compute)
    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(check_chunk)  # type: ignore[no-untyped-call]
    split.backward_weight()
    assert_same_grads((input_grads, pop_grads(list(stage.parameters()))), expected)
    assert max(most) == {1: 1, 300: 2, 2**30: 4}[at_once]


def test_a_new_gradient_is_not_copied() -> None:
    """A weight without `.grad` gets the computed tensor itself, and an existing `.grad` is added to in place."""
    stage, inputs = make_stage("affine", "ours")
    computed: list[int] = []
    compute = DeferredGrad.drain_and_return_remaining_grad

    def note_and_compute(deferred: DeferredGrad) -> Tensor:
        grad = compute(deferred)
        assert grad is not None
        computed.append(grad.data_ptr())
        return grad

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeferredGrad, "drain_and_return_remaining_grad", note_and_compute)
        for _ in range(2):
            split, outputs = split_of(stage, inputs)
            split.backward_input(outputs, grads_for(outputs), inputs)
            split.backward_weight()
    weight = stage.get_parameter("a.weight")
    assert weight.grad is not None
    assert weight.grad.data_ptr() == computed[0] != computed[1]


@pytest.mark.parametrize(("name", "ops"), KINDS)
def test_gradients_are_added_to_existing_ones(name: str, ops: Ops) -> None:
    """A second microbatch adds to the `.grad` of the first in place, with the bits of two full passes."""
    stage, inputs = make_stage(name, ops)
    parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    compute_gradients_in_one_pass(stage, inputs)
    for _ in range(2):
        outputs = run_forward(stage, inputs)
        go_backward(outputs, grads_for(outputs))
    pop_grads(inputs)
    expected = pop_grads(parameters)
    earlier_grads: list[Tensor | None] = []
    for number in range(2):
        split, outputs = split_of(stage, inputs)
        split.backward_input(outputs, grads_for(outputs), inputs)
        split.backward_weight()
        assert number == 0 or all(
            parameter.grad is before for parameter, before in zip(parameters, earlier_grads, strict=True)
        )
        earlier_grads = [parameter.grad for parameter in parameters]
    assert_same_grads((pop_grads(parameters), []), (expected, []))


def test_a_sparse_gradient_is_added_to() -> None:
    """A `.grad` in another layout, without in-place addition, is replaced by the sum, as by a full pass."""
    weight = nn.Parameter(torch.randn(4, 3))
    weight.grad = torch.ones(4, 3).to_sparse()
    grad = DeferredGrad(weight)
    grad.queue_summand(lambda value: value * 2, torch.ones(4, 3))
    split_backward.WeightGrads().accumulate([grad])
    assert torch.equal(grad_of(weight).to_dense(), torch.full((4, 3), 3.0))


def test_gradients_keep_the_dtype_in_which_they_are_summed() -> None:
    """A bfloat16 weight's summands are cast to the dtype of its float32 sum before the addition."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(3, dtype=torch.float32)
    grad = DeferredGrad(weight)
    for part in (256.0, 1.0):  # their sum is no bfloat16
        grad.queue_summand(lambda value: value * 1, torch.full((3,), part, dtype=torch.bfloat16))
    split_backward.WeightGrads().accumulate([grad])
    assert torch.equal(grad_of(weight), torch.full((3,), 257.0, dtype=torch.float32))


@pytest.mark.parametrize(("name", "ops"), KINDS)
def test_shared_nodes_do_not_change_gradients(name: str, ops: Ops) -> None:
    """Three in flight add up to the same bits, though hooks come between them; an error in one spoils no other."""
    sums = []
    for shared in (split_backward.WeightGrads(), None):
        torch.manual_seed(1)
        stage, inputs = make_stage(name, ops)
        parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        called: list[Tensor] = []
        for number in range(2):
            splits = []
            for _ in range(3):
                split = SplitBackward(shared)
                with split.forward_context():
                    outputs = stage(*inputs)
                split.backward_input(outputs, grads_for(outputs), inputs)
                splits.append(split)
            for split in splits:
                split.backward_weight()
            for parameter in parameters[: 1 - number]:
                parameter.register_post_accumulate_grad_hook(called.append)  # type: ignore[no-untyped-call]
        sums.append((pop_grads(parameters), len(called)))
    (ours, times), (others, wanted) = sums
    assert times == wanted
    for one, other in zip(ours, others, strict=True):
        assert one is other is None or (one is not None and other is not None and torch.equal(one, other))


def test_weights_shared_by_microbatches_have_one_node() -> None:
    """Any number of microbatches has one node; a failed one leaves nothing behind for the next."""
    weight = nn.Parameter(torch.randn(3, 3))
    weights = split_backward.WeightGrads()
    roots = set()
    for number in range(3):
        grad, x = DeferredGrad(weight), torch.randn(3, 3)
        grad.queue_summand(lambda value: value, x)
        if number == 1:
            x.add_(1)
            with pytest.raises(RuntimeError, match="changed in place"):
                weights.accumulate([grad])
        else:
            expected = x.clone() if weight.grad is None else weight.grad + x
            weights.accumulate([grad])
            assert torch.equal(grad_of(weight), expected)
        roots.add(tuple(map(id, weights._nodes.values())))
        assert not any(node.deferred for node in weights._nodes.values())
    assert len(roots) == 1


def grad_of(weight: nn.Parameter) -> Tensor:
    """Return the gradient of a weight, any shape."""
    assert weight.grad is not None
    return weight.grad
