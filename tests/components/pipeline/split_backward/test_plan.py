"""Where the gradients of weights are found: not twice, and as late as can be."""

from collections import Counter
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from drawloom.components.pipeline.split_backward.plan import StageWeights
from drawloom.components.pipeline.split_backward.split_backward import SplitBackward
from support.split_passes import Products, Watch, grads_for, in_one, in_two, made, ran, split_of
from support.split_stages import Ops, Parts, Stage, inputs_of


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Everything is computed in float64, unless a test says otherwise."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("ops", get_args(Ops))
def test_the_first_pass_frees_what_weights_do_not_need(ops: Ops) -> None:
    """Gate and up die with the first pass; their product, which the weight of `down` meets, lives until the second."""
    p = Parts(ops)
    stage = Stage(lambda s, x: s.down(F.silu(s.gate(x)) * s.up(x)), gate=p.linear(), up=p.linear(), down=p.linear())
    (x,) = inputs_of(["x"])
    storages: dict[str, StorageWeakRef] = {}

    def note(name: str, tensor: Tensor) -> None:
        storages[name] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def expired() -> dict[str, bool]:
        return {name: storage.expired() for name, storage in storages.items()}  # type: ignore[no-untyped-call]

    stage.get_submodule("gate").register_forward_hook(lambda _module, _inputs, output: note("gate", output))
    stage.get_submodule("up").register_forward_hook(lambda _module, _inputs, output: note("up", output))
    stage.get_submodule("down").register_forward_hook(lambda _module, inputs, _output: note("product", inputs[0]))
    split, outputs = split_of(stage, [x])
    assert not any(expired().values())
    split.backward_input(outputs, grads_for(outputs), [x])
    assert expired() == {"gate": True, "up": True, "product": False}
    split.backward_weight()
    assert expired()["product"]


@pytest.mark.parametrize("ops", get_args(Ops))
@pytest.mark.parametrize("name", ["mlp", "transformer block", "tied around another", "recomputed"])
def test_the_first_pass_frees_the_graph(name: str, ops: Ops) -> None:
    """What waits for the second pass holds numbers, and no node of the graph."""
    stage, inputs = made(name, ops)
    in_one(stage, inputs)  # the first recomputation of a process leaves frames behind
    with Watch(stage) as watch:
        split, outputs = split_of(stage, inputs)
        watch.add(*outputs)
        split.backward_input(outputs, grads_for(outputs), inputs)
        del outputs
        assert not watch.living()
        split.backward_weight()


@pytest.mark.parametrize("ops", get_args(Ops))
def test_recomputes_once(ops: Ops) -> None:
    """A checkpointed region runs once forward and once for both passes."""
    stage, inputs = made("recomputed", ops)
    runs: Counter[str] = Counter()
    for name, module in stage.named_children():
        module.register_forward_hook(lambda *_, name=name: runs.update([name]))
    in_two(stage, inputs)
    assert runs == {"a": 2, "b": 2, "c": 1}


PUT_OFF = {
    "mlp": 2,
    "transformer block": 4,
    "alternating": 4,
    "shared in series": 2,
    "frozen": 2,
    "somebody else's function": 1,
    "recomputed": 3,
}
"""How many uses of weights wait for the second pass."""


@pytest.mark.parametrize("ops", get_args(Ops))
@pytest.mark.parametrize("name", PUT_OFF)
def test_no_product_is_computed_twice(name: str, ops: Ops) -> None:
    """Both passes take as many matrix products as one; the second takes one for each use of a weight."""
    stage, inputs = made(name, ops)
    outputs = ran(stage, inputs)
    with Products() as whole:
        torch.autograd.backward(outputs, grads_for(outputs))
    split, outputs = split_of(stage, inputs)
    with Products() as first:
        split.backward_input(outputs, grads_for(outputs), inputs)
    with Products() as second:
        split.backward_weight()
    assert first.count + second.count == whole.count
    assert second.count == (1 if (name, ops) == ("recomputed", "torch") else PUT_OFF[name])


def test_without_a_trunk_the_second_pass_does_it_all() -> None:
    """Where torch's operations hang together from the output to the weights, the first pass has nothing to do."""
    stage, inputs = made("input without gradient", "torch")
    split, outputs = split_of(stage, inputs)
    with Products() as first:
        split.backward_input(outputs, grads_for(outputs), inputs)
    with Products() as second:
        split.backward_weight()
    assert (first.count, second.count) == (0, 3)


def put_off(stage: Stage, weights: StageWeights) -> list[str]:
    """The parameters that get their gradients in the second pass only, by the products that this takes."""
    inputs = inputs_of(["x"])
    split = SplitBackward(weights)
    with split.forward():
        outputs = ran(stage, inputs)
    split.backward_input(outputs, grads_for(outputs), inputs)
    with Products() as products:
        split.backward_weight()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in stage.parameters())
    names = [name for name, parameter in stage.named_parameters() if parameter.grad is not None and parameter.ndim > 1]
    stage.zero_grad()
    assert products.count == len(names)
    return names


@pytest.mark.parametrize("ops", get_args(Ops))
def test_weights_may_be_frozen_and_thawed_between_steps(ops: Ops) -> None:
    """Each microbatch serves what is trained at its time."""
    p = Parts(ops)
    stage = Stage(lambda s, x: s.b(s.a(x).tanh()), a=p.linear(), b=p.linear())
    weights = StageWeights.of(stage.parameters())
    stage.a.requires_grad_(False)
    assert put_off(stage, weights) == ["b.weight"]
    stage.a.requires_grad_(True)
    assert put_off(stage, weights) == ["a.weight", "b.weight"]
    stage.b.requires_grad_(False)
    assert put_off(stage, weights) == ["a.weight"]
