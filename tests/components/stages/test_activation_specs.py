"""Activation specs between stages, computed on the meta device."""

from typing import Any

import attrs
import pytest
import torch
from torch import nn

from drawloom.components.parallel.layer_partition import partition_layers
from drawloom.components.ports.model import BatchContext, HiddenStates, LayerRange, TokenContext
from drawloom.components.stages.activation_specs import ActivationSpecs
from drawloom.components.state.trees import list_leaves
from support.qwen3 import dense, sparse

STAGES = 3


@attrs.define
class Built:
    """Builds spans of a model on the meta device, and counts the layers."""

    model: Any
    layers: int = 0

    def __call__(self, span: LayerRange) -> nn.Module:
        self.layers += span.last - span.first
        with torch.device("meta"):
            module: nn.Module = self.model.build(span)
        return module


def batch(rows: int = 2, **context: Any) -> tuple[torch.Tensor, BatchContext]:
    """Tokens and their context."""
    tokens = torch.zeros(rows, 5, dtype=torch.int64)
    return tokens, TokenContext(torch.arange(5).repeat(rows, 1), torch.zeros_like(tokens), **context)


def shapes_and_dtypes(tree: Any) -> list[tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes of a tree's tensors."""
    return [(leaf.shape, leaf.dtype) for leaf in list_leaves(tree)]


@pytest.mark.parametrize("make", [dense, sparse])
@pytest.mark.parametrize("ends_apart", [False, True])
def test_a_model_that_keeps_shapes_runs_one_layer(make: Any, ends_apart: bool) -> None:
    """The stages' inputs equal the result of running all layers, for any number of shapes, though one layer runs."""
    spans = partition_layers(6, STAGES)
    if ends_apart:
        ends = LayerRange(0, 0, embedding=True, head=False), LayerRange(6, 6, embedding=False, head=True)
        spans = [ends[0], *(attrs.evolve(span, embedding=False, head=False) for span in spans), ends[1]]
    built = [Built(make(num_hidden_layers=6)) for _ in range(2)]
    declared, recorded = ActivationSpecs(spans, built[0], True), ActivationSpecs(spans, built[1])
    for rows in (2, 3):
        for stage in range(len(spans)):
            given = batch(rows)
            assert shapes_and_dtypes(declared.infer_stage_inputs(stage, *given)) == shapes_and_dtypes(
                recorded.infer_stage_inputs(stage, *given)
            )
    assert (built[0].layers, built[1].layers) == (1, 6 if ends_apart else 4)


def test_hidden_states_of_layers_are_found_by_running_all() -> None:
    """Requested hidden states go along with the last ones, from all earlier layers."""
    spans, model = partition_layers(6, STAGES), dense(num_hidden_layers=6)
    declared = ActivationSpecs(spans, Built(model), True)
    given = batch(hidden_states=HiddenStates((1, 4)))
    assert [len(list_leaves(declared.infer_stage_inputs(stage, *given))) for stage in (1, 2)] == [2, 3]
