"""Remedies for a recipe that does not fit."""

import attrs
import pytest
import tomli

from drawloom import Recipe
from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.frozen_weights import streamed
from drawloom.components.planning.plan import plan
from drawloom.components.planning.search import TriedPlan, find_remedies, format_remedies

RECIPE = Recipe.load(
    "first_run",
    *("model.num_hidden_layers=2", "model.hidden_size=48", "model.intermediate_size=80", "vars.length=64"),
    *("batch.global_size=8", "batch.micro_size=4"),
)


def remedies_at(part: float) -> list[TriedPlan]:
    """Return the remedies on two ranks of a device with this part of the recipe's memory."""
    roomy = plan(RECIPE, find_device_model("cpu"), 2)
    device = attrs.evolve(find_device_model("cpu"), memory=int(part * max(roomy.peak_memory_bytes)))
    return find_remedies(RECIPE, plan(RECIPE, device, 2))


def test_each_line_is_a_setting_with_its_planned_memory() -> None:
    """
    A line is TOML over the recipe. All take less, the last one fits where several lines are needed, and it has these.
    """
    *single, together = remedies_at(0.5)
    assert len(single) >= 4
    assert not any(remedy.plan.fits for remedy in single)
    assert together.plan.fits
    assert len(together.toml_lines) > 1
    peaks = [max(remedy.plan.peak_memory_bytes) for remedy in single]
    assert peaks == sorted(peaks, reverse=True)
    for remedy in (single[0], together):
        overlaid = RECIPE.with_values(tomli.loads("\n".join(remedy.toml_lines)))
        again = plan(overlaid, remedy.plan.device, remedy.plan.ranks)
        assert again.peak_memory_bytes == remedy.plan.peak_memory_bytes
        assert all(line in format_remedies([remedy]) for line in remedy.toml_lines)


@pytest.mark.soak
def test_quantized_frozen_weights_may_be_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe with NF4 weights that does not fit gets the setting as a remedy, with less memory."""
    monkeypatch.setattr(streamed, "WINDOW_BYTES", 1)
    lora = {"use": "adapters.lora", "targets": ["*_proj"], "rank": 2, "alpha": 4.0}
    values = {
        "precision": {"compute": "bfloat16"},
        "quantized": {"use": "frozen_weights.quantized"},
        "adapters": {"lora": lora},
    }
    recipe = RECIPE.with_values({**values, "stages": {"adapters": ["@adapters.*"]}, "model": {"hidden_size": 512}})
    recipe = recipe.with_values({"model": {"intermediate_size": 1024}})
    device = attrs.evolve(find_device_model("cpu"), memory=1_000_000)
    proposed = {line: remedy for remedy in find_remedies(recipe, plan(recipe, device)) for line in remedy.toml_lines}
    remedy = proposed['streamed.use = "frozen_weights.streamed"']
    assert remedy.plan.memory[0].host > 0 and "host memory" in remedy.cost


def test_nothing_is_proposed_where_nothing_helps() -> None:
    """But more ranks or a smaller model, in words."""
    assert "smaller model" in format_remedies([])
