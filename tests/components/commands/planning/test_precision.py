"""`drawloom precision`."""

import tomllib
from pathlib import Path

import pytest
import torch

import drawloom
from drawloom.components.commands.planning.precision import Effect, Float8Effects, format_float8_overlay, relative_error
from support.runs import drawloom as run_drawloom
from support.runs import write_corpus

SIZES = ("model.hidden_size=32", "model.num_attention_heads=2", "model.head_dim=16", "model.intermediate_size=64")


def test_the_command_writes_an_overlay_with_its_evidence(tmp_path: Path) -> None:
    """Every layer has a line with its own error, and the overlay makes the recipe train in float8."""
    write_corpus(tmp_path)
    words = ("precision", "tiny.toml", *SIZES, "--steps", "2", "--to", "float8.toml", "--tolerance", "100")
    [outcome] = run_drawloom(tmp_path, *words)
    assert outcome.code == 0, outcome.text
    text = (tmp_path / "float8.toml").read_text("utf-8")
    assert tomllib.loads(text) == {"precision": {"compute": "bfloat16"}, "float8": {"use": "float8.training"}}
    lines = [line for line in text.splitlines() if "model.layers.0" in line]
    errors = [float(line.split()[1].rstrip("%")) for line in lines]
    assert len(lines) == 7 and errors == sorted(errors, reverse=True)
    assert all(0.1 < error < 20 for error in errors)
    recipe = drawloom.Recipe.load(str(tmp_path / "tiny.toml"), *SIZES, overlays=[str(tmp_path / "float8.toml")])
    assert not recipe.graph.problems


@pytest.mark.parametrize(("tolerance", "excluded"), [(3.0, ["c"]), (0.5, ["a", "b", "c"]), (30.0, [])])
def test_layers_far_above_the_median_are_excluded(tolerance: float, excluded: list[str]) -> None:
    """Layers are excluded by their error relative to the median, also one that is not a number; times are listed."""
    effects = {name: Effect(error, 0.0, 1.0) for name, error in (("a", 0.01), ("b", 0.012), ("c", 0.2))}
    evidence = Float8Effects(effects, Effect(0.2, 0.0, 1.0), 5.0, 2.0)
    assert evidence.find_layers_above_median_error(tolerance) == excluded
    text = format_float8_overlay(evidence, "precision", "float8", "mine", 5, tolerance)
    assert "#   1.200% +0.000000 -1000.000 ms b" in text
    overlay = tomllib.loads(text)
    assert overlay["float8"].get("exclude", []) == excluded
    broken = attrs_evolved(evidence, float("nan"))
    assert "a" in broken.find_layers_above_median_error(tolerance)


def attrs_evolved(evidence: Float8Effects, error: float) -> Float8Effects:
    """Return the evidence with another error of the first layer."""
    alone = {**evidence.alone, "a": Effect(error, 0.0, 1.0), "d": Effect(0.01, 0.0, 1.0)}
    return Float8Effects(alone, evidence.together, evidence.loss, evidence.seconds)


def test_errors_are_relative_to_the_whole_gradient() -> None:
    """The norm of the difference over all parameters is divided by the exact gradient's norm."""
    exact = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    other = [torch.tensor([3.0, 0.3]), torch.tensor([[4.4]])]
    assert relative_error(other, exact) == pytest.approx(0.1)
    assert relative_error(exact, exact) == 0
