"""muP and CompleteP: initial values, learning rates and multipliers over sizes."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from drawloom import Recipe
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.model.granite import Granite
from drawloom.components.model.llama import Llama
from drawloom.components.model.parametrization.completep import CompleteP
from drawloom.components.model.parametrization.mup import MuP
from drawloom.components.optim.adamw import AdamW
from drawloom.components.optim.muon import Muon
from drawloom.components.optim.stochastic_adamw import StochasticAdamW
from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.run import RunInfo, Step
from drawloom.components.ports.stages import Parameters, parameter_roles
from drawloom.graph.problems import RecipeError
from drawloom.testing import fake
from support.checkpoints import SingleRankMesh
from support.qwen3 import cpu_kernels, one_document

NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.layers.0.input_layernorm.weight",
    "hidden": "model.layers.0.mlp.up_proj.weight",
    "residual": "model.layers.0.mlp.down_proj.weight",
    "last norm": "model.norm.weight",
    "head": "lm_head.weight",
}

SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


def granite(parametrization: Any = None, width: int = 64, layers: int = 4) -> Granite:
    """Return a Granite."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": width // 8,
        "head_dim": 8,
        "intermediate_size": 2 * width,
        "vocab_size": 500,
    }
    options: dict[str, Any] = {"tie_word_embeddings": False, "initializer_range": 0.5, "logits_scaling": 2.0}
    return Granite(kernels=cpu_kernels(), parametrization=parametrization, **sizes, **options)


def whole(model: Granite) -> nn.Module:
    """Return a whole model with initial values."""
    module = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
    for name, parameter in module.named_parameters():
        model.initialize_parameter(name, parameter.data, 1)
    return module


def options_of(model: Granite) -> dict[str, tuple[float, float, float]]:
    """Return AdamW's learning rate, weight decay and epsilon by kind."""
    module = whole(model)
    parameters = dict(module.named_parameters())
    trained: Any = fake(
        Parameters,
        named_parameters=[*parameters.items()],
        roles=dict(parameter_roles(module)),
        parameter_slices=dict.fromkeys(parameters),
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


def train(model: Any, create_optimizer: Any) -> list[float]:
    """Train a model with an optimizer for some steps, and return the losses."""
    module: Any = whole(model)
    parameters = dict(module.named_parameters())
    trained: Any = fake(
        Parameters,
        named_parameters=[*parameters.items()],
        roles=dict(parameter_roles(module)),
        parameter_slices=dict.fromkeys(parameters),
    )
    optimizer = create_optimizer(trained)
    optimizer.open()
    generator, losses = torch.Generator().manual_seed(0), []
    for index in range(1, 5):
        tokens = torch.randint(500, (2, 16), generator=generator)
        logits = module(tokens, one_document(2, 16), lambda hidden, head: head.logits(hidden))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.run_phase(Step(index, 4))
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "adamw": lambda parameters: AdamW(parameters=parameters, mesh=SingleRankMesh(), lr=0.01, eps=1e-4),
    "stochastic_adamw": lambda parameters: StochasticAdamW(
        parameters=parameters,
        mesh=SingleRankMesh(),
        job=fake(RunInfo, seed=0),
        device=ComputeDevice(kind="cpu", share=True),
        lr=0.01,
        eps=1e-4,
        state_dtype="float32",
    ),
    "muon": lambda parameters: Muon(parameters=parameters, mesh=SingleRankMesh(), lr=0.01, eps=1e-4),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_folded_multipliers_train_as_multipliers_do(optimizer: str) -> None:
    """
    With multipliers folded into weights, Llama has the losses that an equal Granite with multipliers has, in every
    step; AdamW's epsilon is large enough to count, and the biases of residual outputs learn.
    """
    parametrization = CompleteP(base_hidden_size=16, base_num_hidden_layers=1)
    sizes: dict[str, Any] = {
        "kernels": cpu_kernels(),
        "parametrization": parametrization,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "head_dim": 8,
        "intermediate_size": 128,
        "vocab_size": 500,
        "rope_theta": 1e4,
        "initializer_range": 0.1,
        "attention_bias": True,
        "mlp_bias": True,
    }
    multiplied = train(Granite(**sizes | {"attention_multiplier": 8**-0.5}), OPTIMIZERS[optimizer])
    folded = train(Llama(**sizes), OPTIMIZERS[optimizer])
    assert folded == pytest.approx(multiplied, rel=1e-5) and folded[3] < folded[0]
    assert "residual_multiplier" not in Llama(**sizes).hugging_face_config()


@pytest.mark.parametrize("adjustment", ["original", "match_rms_adamw"])
def test_muon_updates_of_wide_matrices_are_as_large_as_those_of_the_base(adjustment: Any) -> None:
    """A matrix 4 times as wide changes by the base matrix's spectral norm, and decays by the same fraction."""
    norms = {}
    for width in (16, 64):
        module = whole(granite(MuP(base_hidden_size=16), width))
        parameters = dict(module.named_parameters())
        trained: Any = fake(
            Parameters,
            named_parameters=[*parameters.items()],
            roles=dict(parameter_roles(module)),
            parameter_slices=dict.fromkeys(parameters),
        )
        optimizer = Muon(
            parameters=trained, mesh=SingleRankMesh(), lr=0.5, adjust_lr_fn=adjustment, weight_decay=0.0, ns_steps=30
        )
        optimizer.open()
        weight = parameters[NAMES["hidden"]]
        before = weight.detach().clone()
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        optimizer.run_phase(Step(1, 1))
        norms[width] = torch.linalg.matrix_norm(weight.detach() - before, 2).item()
    assert norms[64] == pytest.approx(norms[16], rel=0.3)


MUP = {"use": "model.parametrization.mup", "base_hidden_size": 8}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"optimizer": {"use": "optim.sgd", "lr": 0.1}}, "'?optim.sgd'? has no learning rates"),
        ({"optimizer": {"use": "optim.adam", "lr": 0.1}}, "optim.stochastic_adamw or optim.muon, or remove"),
        (
            {"model": {"use": "model.granite", "config": "config.json", "parametrization": MUP}},
            "may have scaled already",
        ),
        (
            {"model": {"use": "model.llama", **SIZES, "tie_word_embeddings": True, "parametrization": MUP}},
            "scales embedding and head differ",
        ),
        ({"model": {"use": "model.qwen2", **SIZES, "parametrization": MUP}}, "no setting or edge 'parametrization'"),
    ],
)
def test_recipes_that_would_lose_or_repeat_factors_are_refused(values: dict[str, Any], reason: str) -> None:
    """Optimizers without scaling, sizes from a file, tied heads without a multiplier, and other models are problems."""
    recipe = Recipe.load("first_run").with_values({"model": {"use": "model.granite", **SIZES, "parametrization": MUP}})
    recipe.check(skip_machine_checks=True)
    with pytest.raises(RecipeError, match=reason):
        recipe.with_values(values).check(skip_machine_checks=True)
