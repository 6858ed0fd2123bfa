"""Optimizers' parameter groups, by name patterns."""

import copy
import re
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from drawloom import Recipe
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.optim.adamw import AdamW
from drawloom.components.optim.parameter_groups import AdamGroup, ParameterGroup, warn_unmatched_patterns
from drawloom.components.optim.sgd import SGD
from drawloom.components.optim.stochastic_adamw import StochasticAdamW
from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.run import Step
from drawloom.graph import UserError, component
from drawloom.graph.wiring.node import NodeView
from support.checkpoints import SingleRankMesh
from support.doubles import OneJob
from support.equality import assert_equal
from support.steps import make_skipped_step
from support.weights import Weights

SHAPES = {"embed.weight": (5, 4), "layers.0.up.weight": (6, 4), "layers.1.up.weight": (6, 4), "layers.0.norm": (4,)}
SHAPES |= {"layers.1.norm": (4,), "loss.temperature": ()}


def open_optimizer(kind: Any, weights: Weights, **settings: Any) -> Any:
    """Return an optimizer."""
    if kind is StochasticAdamW:
        settings |= {"job": OneJob(), "device": ComputeDevice(kind="cpu")}
    optimizer = kind(parameters=weights, mesh=SingleRankMesh(), **{"lr": 0.1, "weight_decay": 0.3, **settings})
    optimizer.open()
    return optimizer


def steps(optimizer: Any, weights: Weights, *numbers: int) -> None:
    for number in numbers:
        weights.give_gradients(number)
        make = make_skipped_step if number == 3 else Step
        optimizer.run_phase(make(number, 9, state={"lr_factor": 1 / number}))


GROUPS = [
    AdamGroup(targets=["embed.*", "layers.1.norm"], lr_multiplier=0.25),
    AdamGroup(targets=["layers.1.*"], betas=(0.5, 0.6), weight_decay=0.7),
    AdamGroup(targets=["*.norm"], lr_multiplier=2.0, weight_decay=0.2),
]


def test_steps_equal_those_of_torch_with_such_groups() -> None:
    """Weights after steps, one skipped, are bitwise equal to torch's with groups written out by name."""
    ours, theirs = Weights(SHAPES), Weights(SHAPES)
    steps(open_optimizer(AdamW, ours, groups=GROUPS), ours, 1, 2, 3, 4)
    written: list[dict[str, Any]] = [
        {"params": ["layers.0.up.weight"], "weight_decay": 0.3, "factor": 1.0},
        {"params": ["loss.temperature"], "weight_decay": 0.0, "factor": 1.0},
        {"params": ["embed.weight"], "weight_decay": 0.3, "factor": 0.25},
        {"params": ["layers.1.norm"], "weight_decay": 0.0, "factor": 0.25},
        {"params": ["layers.1.up.weight"], "weight_decay": 0.7, "factor": 1.0, "betas": (0.5, 0.6)},
        {"params": ["layers.0.norm"], "weight_decay": 0.2, "factor": 2.0},
    ]
    groups = [setting | {"params": [theirs.parameters[name] for name in setting["params"]]} for setting in written]
    expected = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for number in (1, 2, 4):
        theirs.give_gradients(number)
        for group in expected.param_groups:
            group["lr"] = 0.1 * (1 / number) * group["factor"]
        expected.step()
    assert_equal(dict(ours.named_parameters()), dict(theirs.named_parameters()))


@pytest.mark.parametrize("kind", [AdamW, SGD, StochasticAdamW])
def test_a_group_has_the_steps_of_an_optimizer_with_its_settings(kind: Any) -> None:
    """Parameters are bitwise equal to the result alone in an optimizer with their group's settings."""
    betas = {} if kind is SGD else {"betas": (0.5, 0.6)}
    make = ParameterGroup if kind is SGD else AdamGroup
    weights = Weights(SHAPES)
    groups = [make(targets=["layers.*.up.*"], lr_multiplier=0.5, weight_decay=0.7, **betas)]
    steps(open_optimizer(kind, weights, groups=groups), weights, 1, 2, 3, 4)
    for name, parameter in weights.named_parameters():
        alone = Weights({name: SHAPES[name]})
        settings = {"lr": 0.05, "weight_decay": 0.7, **betas} if ".up." in name else {}
        steps(open_optimizer(kind, alone, **settings), alone, 1, 2, 3, 4)
        assert torch.equal(parameter, alone.parameters[name]), name


@pytest.mark.parametrize("kind", [AdamW, SGD, StochasticAdamW])
def test_a_parameter_keeps_its_state_when_it_changes_groups(kind: Any) -> None:
    """A step after loading into other groups equals, by name, one with the state as it was saved."""
    make = ParameterGroup if kind is SGD else AdamGroup
    weights, others = Weights(SHAPES), Weights(SHAPES)
    before = open_optimizer(kind, weights, groups=[make(targets=["layers.0.*"], lr_multiplier=0.5)])
    steps(before, weights, 1, 2)
    after = open_optimizer(
        kind, others, groups=[make(targets=["embed.*"]), make(targets=["*norm"], lr_multiplier=0.25)]
    )
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert_equal(after.state_dict(), before.state_dict())
    steps(after, others, 4)
    assert after.state_dict().keys() == SHAPES.keys()


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ([["embed"]], "'embed' matches no trained parameter; one is called 'layers.0.norm'"),
        ([["*.up.*"], ["*norm", "layers.1.up.*"]], "'layers.1.up.*' matches 'layers.1.up.weight', but that is in "),
    ],
)
def test_a_pattern_without_a_parameter_is_refused(patterns: list[list[str]], said: str) -> None:
    """A pattern without a match, or whose matches all belong to an earlier group, is an error naming it."""
    with pytest.raises(UserError, match=r"groups\[\d\] of the optimizer: the pattern ") as caught:
        open_optimizer(AdamW, Weights(SHAPES), groups=[AdamGroup(targets=targets) for targets in patterns])
    assert said in str(caught.value)


def texts(recipe: Recipe) -> list[str]:
    """Return `check`'s warnings about the optimizer."""
    return [problem.text for problem in recipe.check() if problem.node == "optimizer"]


@pytest.mark.parametrize("use", ["adam", "adamw", "muon", "sgd", "stochastic_adamw"])
def test_check_finds_patterns_without_a_parameter(use: str) -> None:
    """`check` warns about such patterns at their place, in a run's words, and about no pattern that a run accepts."""
    groups = [{"targets": ["model.embed*", "*norm.weight", "embed"]}, {"targets": ["model.norm.*", "*.k_proj.*"]}]
    values = {"optimizer": {"use": f"optim.{use}", "lr": 1e-3, "groups": groups}}
    assert texts(Recipe.load("first_run").with_values(values)) == [
        "the pattern 'embed' matches no trained parameter; one is called 'model.layers.2.input_layernorm.weight'",
        "the pattern 'model.norm.*' matches 'model.norm.weight', but that is in groups[0]; write groups[1] before it",
    ]


def test_check_finds_targets_of_muon_without_a_parameter() -> None:
    """`check` warns about a pattern without a matrix, such as a norm's, and names a layer's matrix."""
    muon = {"use": "optim.muon", "lr": 1e-3, "targets": ["*layers.*", "*_prj.*", "*norm*"]}
    warnings = texts(Recipe.load("first_run").with_values({"optimizer": muon}))
    assert [text.partition(";")[0] for text in warnings] == [
        f"the pattern '{pattern}' matches no trained matrix" for pattern in ("*_prj.*", "*norm*")
    ]
    assert all(
        re.search(r"one is called 'model\.layers\.\d+\.(mlp|self_attn)\.\w+_proj\.weight'", text) for text in warnings
    )


@pytest.mark.parametrize("name", ["first_run", "moe"])
def test_check_knows_the_names_that_a_run_trains(name: str) -> None:
    """A group per parameter, by whole name, gives no warning; a name unknown to the model does."""
    recipe = Recipe.load(name)
    with recipe.open("model") as run:
        model = run["model"]
        with torch.device("meta"):
            whole = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
    names = [name for name, _ in whole.named_parameters()]
    values = {"optimizer": {"groups": [{"targets": [name]} for name in [*names, "lm_head.bias"]]}}
    [warning] = texts(recipe.with_values(values))
    assert "the pattern 'lm_head.bias' matches no trained parameter" in warning


def test_names_that_adapters_change_are_left_to_the_run() -> None:
    """With adapters the model's own parameters are frozen, and `check` says nothing of patterns."""
    lora = {"use": "adapters.lora", "rank": 2, "targets": ["*_proj"], "alpha": 2}
    values: dict[str, Any] = {"lora": lora, "stages": {"adapters": ["@lora"]}}
    groups = {"optimizer": {"groups": [{"targets": ["*.lora_B"]}]}}
    assert texts(Recipe.load("first_run").with_values(values | groups)) == []
    assert len(texts(Recipe.load("first_run").with_values(groups))) == 1


@component
class Tempered:
    """A loss with a parameter of its own."""

    module: nn.Module = attrs.field(init=False, factory=nn.Module)


def test_names_of_a_loss_are_left_to_the_run() -> None:
    """The last stage holds a loss's parameters, whose names no model tells."""
    values = {"optimizer": {"groups": [{"targets": ["*temperature"]}]}}
    graph = Recipe.load("first_run").with_values(values).graph
    assert len(list(warn_unmatched_patterns(graph.view("optimizer")))) == 1
    spec = attrs.evolve(graph.nodes["loss"].spec, cls=Tempered)
    nodes = {**graph.nodes, "loss": attrs.evolve(graph.nodes["loss"], spec=spec)}
    assert list(warn_unmatched_patterns(NodeView(graph.nodes["optimizer"], nodes))) == []
