"""The fastest plans of a recipe."""

from itertools import pairwise

import attrs
import pytest
import tomli

from drawloom import Recipe
from drawloom.components.commands.planning.plan import make_plan_fields
from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.planning.cost_sources import PlannedCosts
from drawloom.components.planning.plan import PlanCache, TooLargeError, plan
from drawloom.components.planning.search import _abbreviate_lists, format_search_table, search_fastest_plans
from drawloom.graph import UserError

RECIPE = Recipe.load(
    "first_run",
    *("model.num_hidden_layers=2", "model.hidden_size=48", "model.intermediate_size=80", "vars.length=32"),
    *("batch.global_size=2", "batch.micro_size=1"),
)


def test_the_fastest_plans_come_first_and_are_overlays() -> None:
    """An overlay gives the recipe its plan; there is at least a plan with shards, with replicas and with stages."""
    candidates = search_fastest_plans(RECIPE, find_device_model("cpu"), 2)
    seconds = [candidate.plan.time.seconds for candidate in candidates]
    assert all(later > 0.98 * earlier for earlier, later in pairwise(seconds))
    overlays = [tomli.loads("\n".join(candidate.toml_lines)) for candidate in candidates]
    for dimension in ("data_replicate", "data_shard", "pipeline"):
        assert any(overlay["mesh"][dimension] == 2 for overlay in overlays), dimension
    for overlay, candidate in zip(overlays, candidates, strict=True):
        again = plan(RECIPE.with_values(overlay), find_device_model("cpu"), 2)
        assert make_plan_fields(again) == make_plan_fields(candidate.plan)
    lines = [line for line in candidates[0].toml_lines if "[" not in line]  # long lists are left out
    assert all(line in format_search_table(candidates) for line in lines)


@pytest.mark.soak
def test_the_fastest_pipeline_is_tried_with_auto() -> None:
    """Its overlay has the layers' costs, and gives the same plan; no other schedule is faster on this mesh."""
    words = ("model.num_hidden_layers=5", "model.vocab_size=5000", "vars.length=256", "stages.head_layer_cost=2")
    recipe = Recipe.load("first_run", *words, "batch.global_size=8", "batch.micro_size=1")
    device = find_device_model("cpu")
    every = search_fastest_plans(recipe, device, 2)
    overlays = [(tomli.loads("\n".join(candidate.toml_lines)), candidate.plan) for candidate in every]
    [(overlay, planned)] = [pair for pair in overlays if pair[0].get("schedule", {}).get("use", "").endswith(".auto")]
    assert len(overlay["schedule"]["slices"]) == 5
    again = plan(recipe.with_values(overlay), device, 2)
    assert again.time.seconds == planned.time.seconds
    for name in ("one_f_one_b", "zero_bubble_v"):
        other = {"mesh": overlay["mesh"], "batch": overlay["batch"], "schedule": {"use": f"pipeline.schedules.{name}"}}
        assert planned.time.seconds < plan(recipe.with_values(other), device, 2).time.seconds
    assert "schedule.slices = [...]" in format_search_table(every)


@pytest.mark.soak
def test_auto_has_the_memory_that_stages_of_as_many_layers_leave() -> None:
    """This holds also beside a setting for fewer layers in the last stage, ignored by `auto`."""
    words = ("model.num_hidden_layers=5", "model.vocab_size=5000", "vars.length=256", "stages.head_layer_cost=2")
    recipe = Recipe.load("first_run", *words, "batch.global_size=8", "batch.micro_size=1")
    device = attrs.evolve(find_device_model("cpu"), memory=60_000_000)
    tried = [candidate.values for candidate in search_fastest_plans(recipe, device, 2)]
    [values] = [candidate for candidate in tried if candidate.get("schedule", {}).get("use", "").endswith(".auto")]
    alone = PlannedCosts(recipe.with_values({name: values[name] for name in ("mesh", "batch", "stages")}), device)
    assert values["schedule"]["memory"] == alone.auto_schedule_settings(2)["memory"] < 1e8


@pytest.mark.soak
def test_stages_too_large_under_auto_are_left_out() -> None:
    """
    The search finds a pipeline that fits, although the stages of `auto` would not. The head costs more than layers, so
    `auto` gives most layers to the first stage with the embedding: in a hardly trained model, parameters fill a rank's
    memory.
    """
    words = [
        *("precision.compute=bfloat16", "precision.parameter=bfloat16", "vars.length=16", "batch.global_size=2"),
        *("lora.use=adapters.lora", "lora.rank=2", 'lora.targets=["*_proj"]', "lora.alpha=2", "batch.micro_size=1"),
        *('stages.adapters=["@lora"]', "model.num_hidden_layers=16", "model.hidden_size=1024"),
        *("model.intermediate_size=3072", "model.vocab_size=60000", "model.tie_word_embeddings=false"),
    ]
    recipe = Recipe.load("first_run", *words)
    device = attrs.evolve(find_device_model("cpu"), memory=300_000_000)
    candidates = search_fastest_plans(recipe, device, 2)
    assert all(candidate.plan.fits for candidate in candidates)
    assert [
        candidate.values["schedule"]["use"] for candidate in candidates if candidate.values["mesh"]["pipeline"] == 2
    ] == ["pipeline.schedules.one_f_one_b"]


def test_experts_are_tried_on_one_rank_and_on_several() -> None:
    """Both are tried even if the recipe partitions experts: its own expert dimension is ignored."""
    words = ("mesh.data_shard=2", "mesh.expert=2", "stages.dispatcher.use=experts.all_to_all", "vars.length=64")
    recipe = Recipe.load("moe", *words, "batch.global_size=4", "batch.micro_size=2")
    every = [
        tomli.loads("\n".join(candidate.toml_lines))
        for candidate in search_fastest_plans(recipe, find_device_model("h200"), 2)
    ]
    ways = {(candidate["mesh"]["expert"], candidate["stages"]["dispatcher"]["use"]) for candidate in every}
    assert ways == {(1, "experts.local"), (2, "experts.all_to_all")}


def test_rows_are_divided_as_the_recipe_says() -> None:
    """All meshes have the recipe's context dimension; the search tries the other dimensions."""
    every = search_fastest_plans(RECIPE.with_values({"mesh": {"context": 2}}), find_device_model("cpu"), 4)
    sizes = {
        (size.context, size.pipeline, size.data_shard) for size in (candidate.plan.mesh.sizes for candidate in every)
    }
    assert {(2, 1, 2), (2, 2, 1), (2, 1, 1)} <= sizes
    assert {size[0] for size in sizes} == {2}


def test_long_lists_are_left_out_of_the_table_one_by_one() -> None:
    """This includes nested lists; short values of the same setting stay."""
    every = ", ".join(["0.125"] * 12)
    nested = ", ".join(["[1.0, 2.0, 1.0, 1.0]"] * 5)
    line = f"slices = [{nested}]; recompute = {{ selective = {{ again = [{every}], kept = 0.5 }}, x = [1, 2] }}"
    shown = "slices = [...]; recompute = { selective = { again = [...], kept = 0.5 }, x = [1, 2] }"
    assert _abbreviate_lists(line) == shown


def test_ranks_without_a_suitable_mesh_are_reported() -> None:
    """The message replaces an empty table, with the reason unless it is the number of rows in a step."""
    assert "another number of ranks" in format_search_table(search_fastest_plans(RECIPE, find_device_model("cpu"), 7))
    circular = {"schedule": "pipeline.schedules.circular", "executor": "pipeline.circular.executor"}
    recipe = RECIPE.with_values({name: {"use": use} for name, use in circular.items()})
    with pytest.raises(UserError, match=r"no mesh of 2 ranks suits the recipe: .* embedding and head on every rank"):
        search_fastest_plans(recipe, find_device_model("cpu"), 2)


def test_meshes_whose_parameters_do_not_fit_are_left_out() -> None:
    """Their activations are not recorded; if no plan fits, plans with the least memory are shown."""
    small = attrs.evolve(
        find_device_model("cpu"), memory=plan(RECIPE, find_device_model("cpu"), 1).memory[0].persistent["parameters"]
    )
    candidates = search_fastest_plans(RECIPE, small, 2)
    sizes = [max(candidate.plan.peak_memory_bytes) for candidate in candidates]
    assert candidates
    assert not any(candidate.plan.fits for candidate in candidates)
    assert sizes == sorted(sizes)
    with pytest.raises(TooLargeError, match="bytes besides activations"):
        plan(RECIPE, small, 1, PlanCache())
