"""A memory policy in plans and in runs."""

from pathlib import Path
from typing import Any

import attrs
import pytest

from drawloom import Recipe
from drawloom.components.commands.planning.plan import ChoiceData, make_plan_fields
from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.pipeline.schedules.gpipe import GPipe
from drawloom.components.planning import memory
from drawloom.components.planning.calibrate import load_local_device_model
from drawloom.components.planning.memory import PlannedMemory
from drawloom.components.planning.plan import Plan, plan
from drawloom.components.planning.text import describe_memory_choice, format_plan
from drawloom.components.ports.features import MemoryChoice
from drawloom.graph.problems import UserError

SMALL = (
    *("model.num_hidden_layers=2", "model.hidden_size=48", "model.num_attention_heads=4", "device.kind=cpu"),
    *("model.num_key_value_heads=2", "model.head_dim=16", "model.intermediate_size=80", "vars.length=64"),
    *("batch.global_size=8", "batch.micro_size=1", "precision.parameter=bfloat16", "precision.gradient=bfloat16"),
    *("optimizer.use=optim.stochastic_adamw", "optimizer.lr=1e-3"),
)
CHOSEN: dict[str, dict[str, Any]] = {
    "memory": {"use": "planning.memory"},
    "stages": {"memory": "@memory"},
    "optimizer": {"memory": "@memory", "slot_bytes": 4096},
}
SLOTS = "optimizer.slot_bytes=4096"
PIPELINE = ("mesh.pipeline=2", "schedule.use=pipeline.schedules.gpipe")


def plan_small(
    *words: str,
    limit: float | None = None,
    host_limit: float | None = None,
    quantize: bool = False,
    device: str = "cpu",
    **figures: Any,
) -> Plan:
    """Plan the small recipe on a device with other figures, with a policy if there is a limit."""
    recipe = Recipe.load("first_run", *SMALL, *words)
    if limit is not None:
        limits: dict[str, Any] = {"limit": limit, "quantize": quantize} | (
            {} if host_limit is None else {"host_limit": host_limit}
        )
        recipe = recipe.with_values(CHOSEN).with_values({"memory": limits})
    return plan(recipe, attrs.evolve(find_device_model(device), **figures))


def settings_of(planned: Plan) -> list[str]:
    """Return a plan's choice as words; all its stages have the same."""
    choice = planned.choice
    assert choice is not None
    [policy] = {*choice.recompute}
    words = [f"stages.recompute={policy}", *["offload.use=pipeline.offloaded"] * bool(choice.offloaded)]
    return [*words, *["optimizer.states=host", SLOTS] * (choice.host_states == (1.0,))]


def test_a_choice_is_the_fastest_of_all_settings_that_fit() -> None:
    """Its plan equals the plan with these settings, and no fitting settings are faster, at every limit."""
    every = [
        plan_small(f"stages.recompute={policy}", *states)
        for policy in ("none", "2", "blocks")
        for states in ((), ("optimizer.states=host", SLOTS))
    ]
    peaks = sorted({max(planned.peak_memory_bytes) for planned in every})
    for limit in (peaks[2], peaks[-1]):
        chosen = plan_small(limit=limit)
        assert chosen.fits
        same = plan_small(*settings_of(chosen))
        assert (chosen.peak_memory_bytes, chosen.time) == (same.peak_memory_bytes, same.time)
        fitting = [planned for planned in every if max(planned.peak_memory_bytes) <= limit]
        assert chosen.time.seconds <= min(planned.time.seconds for planned in fitting) * (1 + 1e-9)
    assert chosen.time.seconds == chosen.kept_seconds
    assert "everything is kept on the device" in format_plan(chosen)
    assert not plan_small(limit=peaks[0] - 1).fits


def test_state_moves_to_a_host_that_has_room_for_it() -> None:
    """With a fast link it goes before activations are recomputed; without room on the host it stays."""
    resident = plan_small()
    limit = max(resident.peak_memory_bytes) - 1000
    moved, stays = (plan_small(limit=limit, host_limit=room, host_link=1e15) for room in (1e9, 10.0))
    assert moved.choice is not None and stays.choice is not None
    [part] = moved.choice.host_states
    assert 0 < part < 1 and {*moved.choice.recompute} == {"none"}
    assert stays.choice.host_states == (0.0,) and {*stays.choice.recompute} != {"none"}
    assert make_plan_fields(moved)["choice"] == ChoiceData(["none"], [], [part])
    assert "optimizer state in host memory" in format_plan(moved)


def test_pipelines_offload_over_a_fast_link_and_recompute_beside_a_slow_one() -> None:
    """The peak of both fits; offloading costs nothing if the link is fast."""
    limit = max(plan_small(*PIPELINE).peak_memory_bytes) * 0.8
    fast, slow = (plan_small(*PIPELINE, limit=limit, host_link=link) for link in (1e15, 1e3))
    assert fast.choice is not None and slow.choice is not None
    assert fast.fits and slow.fits and fast.choice.offloaded and not slow.choice.offloaded
    assert fast.time.seconds == pytest.approx(fast.kept_seconds)
    assert {*slow.choice.recompute} != {"none"}


def test_activations_are_quantized_only_if_the_recipe_allows_it() -> None:
    """
    Where it takes less time than recomputing blocks, 8 bits are chosen with `quantize`, and the plan says that
    gradients are rounded; without, all choices are exact.
    """
    wide = ("model.hidden_size=4096", "model.intermediate_size=16384", "model.head_dim=128", "vars.length=2048")
    limit = max(plan_small(*wide, "stages.recompute=quantized", device="h100").peak_memory_bytes)
    exact, lossy = (
        plan_small(*wide, limit=limit, host_limit=10.0, quantize=may, device="h100") for may in (False, True)
    )
    assert exact.choice is not None and lossy.choice is not None and exact.fits and lossy.fits
    assert lossy.choice.recompute == ("quantized",) and "quantized" not in exact.choice.recompute
    assert lossy.time.seconds < exact.time.seconds
    assert "8 bits round gradients" in describe_memory_choice(lossy)
    assert "round gradients" not in describe_memory_choice(exact)


def test_a_run_uses_its_choice_and_refuses_what_never_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages and optimizer have the plan's policies; below the smallest plan the run is refused with remedies."""
    monkeypatch.chdir(tmp_path)
    resident = plan_small()
    limits = {"memory": {"limit": max(resident.peak_memory_bytes) * 0.7}}
    recipe = Recipe.load("first_run", *SMALL).with_values(CHOSEN).with_values(limits)
    planned = plan(recipe, find_device_model("cpu"))
    with recipe.open(["stages", "optimizer"]) as run:
        assert planned.choice is not None and planned.choice.recompute == (run["stages"].local[0].recompute,)
        assert run["optimizer"].host_bytes() == planned.memory[0].host
        assert run["stages"].local[0].recompute != "none" or run["optimizer"].host_bytes()
    monkeypatch.setattr(memory, "describe_excess", lambda _, refused: f"{refused.device.memory} bytes")
    tight = recipe.with_values({"memory": {"limit": 3e5}})
    with pytest.raises(UserError, match="300000 bytes"), tight.open("stages"):
        pass


def test_a_run_offloads_the_stages_of_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor finds the policy by type, and runs programs that offload the chosen stages, and a schedule's own."""
    recipe = Recipe.load("first_run", *SMALL).with_values(CHOSEN)
    assert recipe.graph.nodes["executor"].edges["features"].targets == ("memory",)
    monkeypatch.setattr(PlannedMemory, "_choice", MemoryChoice(("none",) * 2, frozenset({1}), (0.0,)))
    nothing: Any = None
    policy = PlannedMemory(recipe=nothing, device=nothing, processes=nothing)
    program = attrs.evolve(GPipe().program(2, 4), offloaded=frozenset({0}))
    assert policy.change_program(program).offloaded == {0, 1}


def test_explain_has_the_choice_for_this_machine() -> None:
    """The note has the plan's sentence, or says that nothing fits."""
    limit = max(plan_small().peak_memory_bytes) - 1000
    recipe = Recipe.load("first_run", *SMALL).with_values(CHOSEN).with_values({"memory": {"limit": limit}})
    planned = plan(recipe, load_local_device_model())
    assert f"for 1 rank on {planned.device.name}: {describe_memory_choice(planned)}" in recipe.explain("memory")
    assert "nothing fits" in recipe.with_values({"memory": {"limit": 3e5}}).explain("memory")


def test_settings_that_a_policy_chooses_are_refused() -> None:
    """Recompute, offload and states belong to the policy."""
    for word in ("stages.recompute=blocks", "offload.use=pipeline.offloaded", "optimizer.states=host"):
        [problem] = Recipe.load("first_run", *SMALL, word).with_values(CHOSEN).graph.problems
        assert "chooses" in str(problem) and "remove" in str(problem)
