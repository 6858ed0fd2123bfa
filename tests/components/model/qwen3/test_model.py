"""Spans of a model: chained they are the whole."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drawloom.components.model.qwen3.builder import Qwen3Builder
from drawloom.components.ports.model import LayerRange
from support.qwen3 import dense, one_document, packed, sparse, whole
from support.split_passes import Products, grads_for, in_one, same, split_of, taken
from support.split_stages import Stage

SPLITS = [
    [LayerRange(0, 1, True, False), LayerRange(1, 3, False, True)],
    [LayerRange(0, 0, True, False), LayerRange(0, 3, False, False), LayerRange(3, 3, False, True)],
]


Make = Callable[..., Qwen3Builder]
both = pytest.mark.parametrize(
    "make", [dense, partial(sparse, mlp_only_layers=[1], router_aux_loss_coef=0.5)], ids=["dense", "with experts"]
)


def built(model: Qwen3Builder, spans: list[LayerRange], weights: nn.Module) -> list[nn.Module]:
    """Modules of spans, with the weights of the whole under the same names."""
    state = weights.state_dict()
    modules = [model.build(span) for span in spans]
    for module in modules:
        module.load_state_dict({name: state[name] for name in module.state_dict()})
    return modules


@pytest.mark.parametrize("spans", SPLITS, ids=["two spans", "three spans, ends without layers"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@both
def test_chained_spans_equal_the_whole(spans: list[LayerRange], tied: bool, make: Make) -> None:
    """Chained spans give bitwise the losses and logits of the whole, and gradients that add up to its gradients."""
    model = make(num_hidden_layers=3, tie_word_embeddings=tied)
    module = whole(model)
    modules = built(model, spans, module)
    tokens, targets = torch.randint(29, (2, 2, 10))
    for shared in (packed([[4, 6], [10]], targets), one_document(2, 10)):
        expected, found = module(tokens, shared), tokens
        for part in modules:
            found = part(found, shared)
        assert torch.equal(found, expected)
        module.zero_grad()
        for part in modules:
            part.zero_grad()
        expected.sum().backward()
        found.sum().backward()
        for name, parameter in module.named_parameters():
            grads = [dict(part.named_parameters())[name].grad for part in modules if name in part.state_dict()]
            total = torch.stack([grad for grad in grads if grad is not None]).sum(0)
            torch.testing.assert_close(total, parameter.grad)


@pytest.mark.parametrize("spans", SPLITS)
@both
def test_names_do_not_depend_on_the_split(spans: list[LayerRange], make: Make) -> None:
    """Spans name their parameters as the whole does, and together hold each; a tied head brings the embedding."""
    for tied in (False, True):
        model = make(num_hidden_layers=3, tie_word_embeddings=tied)
        names = [name for span in spans for name, _ in model.build(span).named_parameters()]
        assert set(names) == {name for name, _ in whole(model).named_parameters()}
        assert names.count("embedding.weight") == (2 if tied else 1)
        assert len(names) == len(set(names)) + tied


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ends", [(True, True), (True, False), (False, False), (False, True)])
@both
def test_stages_put_every_matrix_off(ends: tuple[bool, bool], tied: bool, recompute: bool, make: Make) -> None:
    """Two backward passes of the first, a middle, the last or the only stage give what one gives, recomputed or not."""
    model = make(tie_word_embeddings=tied)
    module = model.build(LayerRange(0, 2, *ends)).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    if recompute:
        for block in module.get_submodule("layers").children():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    shared = one_document(2, 10, torch.randint(29, (2, 10)))
    hidden = torch.randn(2, 10, model.architecture.hidden_size, dtype=torch.float64, requires_grad=True)
    inputs = [torch.randint(29, (2, 10)) if ends[0] else hidden]
    stage = Stage(lambda s, x: s.module(x, shared), module=module)
    expected, (split, outputs) = in_one(stage, inputs), split_of(stage, inputs)
    with Products() as first:
        found = split.backward_input(outputs, grads_for(outputs), inputs)
    with Products() as second:
        split.backward_weight()
    same((found, taken(list(stage.parameters()))), expected)
    linear_layers = sum(parameter.ndim > 1 for parameter in module.parameters())
    assert second.count == linear_layers - ends[0] + (tied and all(ends))
    assert first.count > 0
