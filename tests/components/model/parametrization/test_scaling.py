"""muP and CompleteP: initial values, learning rates and multipliers over sizes."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from drawloom import Recipe
from drawloom.components.model.granite import Granite
from drawloom.components.model.parametrization.completep import CompleteP
from drawloom.components.model.parametrization.mup import MuP
from drawloom.components.optim.adamw import AdamW
from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.parameter_roles import parameter_roles
from drawloom.components.ports.run import Step
from drawloom.components.ports.stages import Parameters
from drawloom.graph.problems import RecipeError
from drawloom.testing import fake
from support.checkpoints import SingleRankMesh
from support.qwen3 import cpu_kernels

NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.layers.0.input_layernorm.weight",
    "hidden": "model.layers.0.mlp.up_proj.weight",
    "residual": "model.layers.0.mlp.down_proj.weight",
    "last norm": "model.norm.weight",
    "head": "lm_head.weight",
}


def granite(parametrization: Any = None, width: int = 64, layers: int = 4) -> Granite:
    """Return a Granite."""
    return Granite(
        kernels=cpu_kernels(),
        parametrization=parametrization,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 8,
        head_dim=8,
        intermediate_size=2 * width,
        vocab_size=500,
        tie_word_embeddings=False,
        initializer_range=0.5,
        logits_scaling=2.0,
    )


def whole(model: Granite) -> nn.Module:
    """Return a whole model with initial values."""
    module = model.build(LayerRange(0, model.num_hidden_layers, True, True))
    for name, parameter in module.named_parameters():
        model.initialise(name, parameter.data, 1)
    return module


def options_of(model: Granite) -> dict[str, tuple[float, float, float]]:
    """Return AdamW's learning rate, weight decay and epsilon by kind."""
    module = whole(model)
    parameters = dict(module.named_parameters())
    trained: Any = fake(
        Parameters,
        named_parameters=[*parameters.items()],
        roles=dict(parameter_roles(module)),
        slices=dict.fromkeys(parameters),
    )
    optimizer = AdamW(parameters=trained, mesh=SingleRankMesh(), lr=0.5, weight_decay=0.25, eps=1e-4)
    optimizer.open()
    optimizer.run_phase(Step(1, 1))
    by_parameter = {
        parameter: (group["lr"], group["weight_decay"], group["eps"])
        for inner in optimizer._optimizers
        for group in inner.param_groups
        for parameter in group["params"]
    }
    return {kind: by_parameter[parameters[name]] for kind, name in NAMES.items()}


@pytest.mark.parametrize(
    ("parametrization", "depth"),
    [(MuP(base_hidden_size=16), 1), (CompleteP(base_hidden_size=16, base_num_hidden_layers=2), 2)],
)
def test_scales_are_those_of_the_papers(parametrization: Any, depth: int) -> None:
    """With 4 times the width (and twice the depth), options, deviations and multipliers agree with CompleteP."""
    model = granite(parametrization)
    assert options_of(model) == {
        "embedding": (0.5, 0.25, 1e-4 / 4),
        "norm": (0.5, 0.0, 1e-4 / 4 / depth),
        "hidden": (0.5 / 4, 0.25 * 4, 1e-4 / 4 / depth),
        "residual": (0.5 / 4, 0.25 * 4, 1e-4 / 4 / depth),
        "last norm": (0.5, 0.0, 1e-4 / 4),
        "head": (0.5, 0.25, 1e-4 / 4),
    }
    parameters = dict(whole(model).named_parameters())
    deviations = {kind: parameters[name].detach().std().item() for kind, name in NAMES.items() if "norm" not in kind}
    base_layers = 4 / depth
    wanted = {"embedding": 0.5, "hidden": 0.25, "residual": 0.25 / math.sqrt(2 * base_layers), "head": 0.5}
    assert deviations == pytest.approx(wanted, rel=0.05)
    config = model.hugging_face_config()
    assert config["logits_scaling"] == 2.0 * 4 and config["residual_multiplier"] == 1 / depth


def test_base_model_is_unscaled() -> None:
    """A parametrization keeps the base model's weights and options."""
    base = CompleteP(base_hidden_size=64, base_num_hidden_layers=4)
    assert options_of(granite(base)) == options_of(granite())
    pairs = zip(whole(granite(base)).parameters(), whole(granite()).parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert granite(base).architecture == granite().architecture


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"optimizer": {"use": "optim.sgd", "lr": 0.1}}, "'?optim.sgd'? has no learning rates"),
        ({"optimizer": {"use": "optim.stochastic_adamw", "lr": 0.1}}, "'?optim.stochastic_adamw'? has no learning"),
        ({"model": {"use": "model.granite", "config": "config.json"}}, "may have scaled already"),
    ],
)
def test_recipes_that_would_lose_or_repeat_factors_are_refused(values: dict[str, Any], reason: str) -> None:
    """Optimizers without scaling and sizes from a file are problems."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    tables = {
        "model": {"use": "model.granite", **sizes},
        "parametrization": {"use": "model.parametrization.mup", "base_hidden_size": 8},
    }
    recipe = Recipe.load("first_run").with_values(tables)
    recipe.check(elsewhere=True)
    with pytest.raises(RecipeError, match=reason):
        recipe.with_values(values).check(elsewhere=True)
