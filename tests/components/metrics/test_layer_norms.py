"""Norms layer by layer."""

from typing import Any

import pytest
import torch
from torch import nn

from drawloom.components.metrics.layer_norms import LayerNorms, layer_number_or_module_name
from drawloom.components.ports.run import Step
from support.metrics import measure
from support.weights import Weights


def weights(**values: tuple[float, float | None]) -> dict[str, nn.Parameter]:
    """Return parameters with two equal numbers, and gradients with two equal numbers."""
    parameters = {}
    for name, (value, grad) in values.items():
        parameters[name.replace("__", ".")] = parameter = nn.Parameter(torch.full((2,), value))
        parameter.grad = None if grad is None else torch.full((2,), grad)
    return parameters


def test_norms_cover_all_parameters_of_a_layer(one_rank: Any) -> None:
    """Layers come in the order of their numbers, others by name; a parameter without gradient adds nothing."""
    parts = weights(
        model__layers__10__a=(1.0, 2.0),
        model__layers__2__b=(3.0, 4.0),
        model__layers__2__c=(4.0, 3.0),
        model__norm__weight=(5.0, None),
        lm_head__weight=(6.0, 1.0),
    )
    metric = LayerNorms(parameters=Weights.from_parameters(parts, others=("lm_head.weight",)), mesh=one_rank)
    metric.open()
    step = Step(1, 1)
    metric.run_phase(step)
    root = 2**0.5
    norms = measure(metric, step)
    assert [*norms] == [
        f"{kind}_norm/{layer}" for kind in ("grad", "weight") for layer in ("2", "10", "lm_head", "norm")
    ]
    assert norms == pytest.approx(
        {
            "grad_norm/2": 5 * root,
            "grad_norm/10": 2 * root,
            "grad_norm/lm_head": 0.0,
            "grad_norm/norm": 0.0,
            "weight_norm/2": 5 * root,
            "weight_norm/10": root,
            "weight_norm/lm_head": 0.0,
            "weight_norm/norm": 5 * root,
        }
    )


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp.up_proj.weight", "12"),
        ("model.embed_tokens.weight", "embed_tokens"),
        ("loss.0.layer.model.layers.12.mlp.up_proj.weight", "loss"),
        ("scale", "scale"),
    ],
)
def test_layers_are_named_as_people_number_them(name: str, layer: str) -> None:
    """Layers have their number in the whole model, a loss's are its own, others have their module's name."""
    assert layer_number_or_module_name(name) == layer
