"""Where costs come from."""

import attrs
import numpy as np
import pytest

from drawloom import Recipe
from drawloom.components.distributed.device_model import DeviceModel, find_device_model
from drawloom.components.pipeline.program.timing import Costs, CostTable
from drawloom.components.planning.cost_sources import (
    FixedPartitionSchedule,
    PlannedCosts,
    TracedCosts,
    TracedStep,
    UnitCosts,
)
from drawloom.components.planning.plan import Plan, plan
from drawloom.components.ports.stages import Recompute
from drawloom.graph import UserError
from support.plans import RECIPE
from support.schedules import parse_program, schedule


def test_a_plan_costs_as_much_in_other_stages() -> None:
    """One stage on a rank or two: the forward passes of all stages take as long, and more live at once in GPipe."""
    planned = PlannedCosts(RECIPE.with_values({"model": {"num_hidden_layers": 4}}), find_device_model("cpu"))
    one, two = (planned.stage_costs(2, stages) for stages in (1, 2))
    assert isinstance(one, CostTable)
    assert isinstance(two, CostTable)
    assert (one.lengths.shape, two.lengths.shape) == ((2, 4), (4, 4))
    assert two.lengths.sum(0) == pytest.approx(one.lengths.sum(0), rel=0.03)
    first, all_at_once = (
        planned.peak_activation_bytes(schedule(name).program(2, 4)) for name in ("one_f_one_b", "gpipe")
    )
    assert all_at_once[1] > 2 * first[1]
    with pytest.raises(UserError, match="4 layers can't be cut into 6 stages"):
        planned.stage_costs(3, 2)


def test_a_trace_gives_costs_for_any_stages() -> None:
    """A trace gives its own stages' costs, and shares of them."""
    program = parse_program("0: 0F0 0B0\n1: 1F0 1B0\n")
    times = np.array([0.0, 6, 1, 3])
    traced = TracedCosts(TracedStep(program, times, times + np.array([1, 2, 2, 3])))
    costs = traced.stage_costs(2, 1)
    assert isinstance(costs, CostTable)
    assert costs.lengths[:, 0].tolist() == [1, 2]
    assert [traced.stage_costs(2, 2).get_duration("B", stage) for stage in range(4)] == [1, 1, 1.5, 1.5]


def test_stages_share_the_units_of_a_rank() -> None:
    """The costs of a rank's units are divided among its stages."""
    assert UnitCosts(Costs(comm=1)).stage_costs(4, 2) == Costs(0.5, 0.5, 0.5, comm=1)


def test_slices_of_a_plan_make_the_stages_of_another() -> None:
    """
    Sums over slices, and the other costs per stage, equal a plan's stage costs for any layer counts. The model's large
    vocabulary makes the last slice, with the head, the costliest; the host is not the limit.
    """
    words = ("model.num_hidden_layers=6", "model.vocab_size=30000", "model.hidden_size=768", "vars.length=2048")
    planned = PlannedCosts(
        Recipe.load("first_run", *words, "batch.micro_size=4"), find_device_model("h100").without_host_time()
    )
    settings = planned.auto_schedule_settings(2)
    slices, per_stage = np.array(settings["slices"]), np.array(settings["per_stage"])
    assert slices[-1].sum() > 2 * slices[2].sum() and settings["memory"] > 1e9
    for sizes in ([3, 3], [5, 1], [2, 1, 1, 2]):
        ends = np.cumsum(sizes)
        wanted = [slices[end - size : end].sum(0) + per_stage for size, end in zip(sizes, ends, strict=True)]
        table = planned.stage_costs(2, len(sizes) // 2, sizes)
        assert isinstance(table, CostTable)
        assert table.lengths == pytest.approx(np.array(wanted), rel=0.03)


def test_recomputed_slices_of_a_plan_make_the_stages_of_another() -> None:
    """
    Repeated work and kept bytes by layer, summed by stage, equal a plan's seconds and bytes with recomputation in all
    or some layers of a stage, where the host is not the limit. A recipe with its own recomputation leaves nothing to
    choose.
    """
    recipe = Recipe.load("first_run", "model.num_hidden_layers=6", "vars.length=2048", "batch.micro_size=4")
    planned = PlannedCosts(recipe, find_device_model("h100").without_host_time())
    settings = planned.auto_schedule_settings(2)
    forward, activations = np.array(settings["slices"])[:, 0], np.array(settings["activations"])
    cases: list[tuple[tuple[Recompute, ...], list[list[int]]]] = [
        (("blocks", "none"), [[0, 1, 2], []]),
        (("selective", "blocks"), [[0, 1, 2], [3, 4, 5]]),
        ((2, 3), [[0, 2], [3]]),
    ]
    for policies, cuts in cases:
        cut = planned.plan(2, 1, FixedPartitionSchedule((0, 1), (3, 3), policies))
        plain = planned.plan(2, 1, FixedPartitionSchedule((0, 1), (3, 3)))
        for stage, (policy, again) in enumerate(zip(policies, cuts, strict=True)):
            parts = settings["recompute"]["selective" if policy == "selective" else "blocks"]
            more = sum(forward[layer] * parts["again"][layer] for layer in again)
            took = cut.table.lengths[stage] - plain.table.lengths[stage]
            assert took[1:3] == pytest.approx(more, rel=0.05, abs=0.03 * plain.table.lengths[stage, 1]), policy
            left = sum(activations[layer] * (1 - parts["kept"][layer]) for layer in again)
            kept = [estimate.costs[stage].passes["F"].total_kept_bytes for estimate in (plain, cut)]
            assert kept[0] - kept[1] == pytest.approx(left, rel=0.05, abs=0.02 * kept[0]), policy
            assert cut.costs[stage].passes["I"].total_kept_bytes == pytest.approx(
                plain.costs[stage].passes["I"].total_kept_bytes, rel=0.05
            )
    other = PlannedCosts(recipe.with_values({"stages": {"recompute": "selective"}}), find_device_model("h100"))
    assert "recompute" not in other.auto_schedule_settings(2)


def short_of_memory(part: float, shards: int, *words: str) -> tuple[Recipe, DeviceModel, Plan]:
    """Return a recipe, a device with a part of the needed memory, and `auto`'s plan."""
    ranks = f"mesh.data_shard={shards}", "mesh.data_replicate=1", "mesh.pipeline=2"
    recipe = Recipe.load("first_run", *ranks, "model.num_hidden_layers=8", "batch.global_size=32", *words)
    device = find_device_model("h100").without_host_time()
    most = max(plan(recipe, device, 2 * shards).peak_memory_bytes)
    small = attrs.evolve(device, memory=int(part * most))
    schedule = {
        "use": "pipeline.schedules.auto",
        "microbatches": 8,
        **PlannedCosts(recipe, small).auto_schedule_settings(2),
    }
    return recipe, small, plan(recipe.with_values({"schedule": schedule}), small, 2 * shards)


def test_a_program_that_fits_by_slices_fits_in_its_plan() -> None:
    """If memory is short, the plan with recomputation fits, and is faster than with one policy for all stages."""
    recipe, small, auto_plan = short_of_memory(0.55, 1, "vars.length=2048", "batch.micro_size=4")
    assert auto_plan.fits and {*auto_plan.program.recompute} - {"none"}
    policies = [{"stages": {"recompute": policy}} for policy in ("none", "selective", "blocks")]
    others = [plan(recipe.with_values(policy), small, 2) for policy in policies]
    assert auto_plan.time.seconds < min(other.time.seconds for other in others if other.fits)


def test_gradients_that_are_whole_in_a_step_leave_less_memory() -> None:
    """Sharded parameters' gradients are whole during backward passes, and the plan fits beside them."""
    words = ("vars.length=1024", "model.hidden_size=1024", "model.intermediate_size=3072", "model.vocab_size=8000")
    _, _, auto_plan = short_of_memory(0.82, 2, *words, "batch.micro_size=2")
    assert auto_plan.memory[0].whole_gradients > 1.9 * auto_plan.memory[0].gradients
    assert auto_plan.fits and {*auto_plan.program.recompute} - {"none"}


def test_units_count_recomputed_work() -> None:
    """A stage that recomputes all or one of its two blocks has a longer backward by their share in the forward."""
    costs = UnitCosts(Costs(comm=1)).stage_costs(2, 1, None, ("blocks", 2))
    assert [[costs.get_duration(op, stage) for op in "FBIW"] for stage in (0, 1)] == [[1, 3, 2, 1], [1, 2.5, 1.5, 1]]
    assert costs.comm == 1


def test_slices_of_a_trace_are_shares_of_its_stages() -> None:
    """A rank has two slices, with their ops' times."""
    program = parse_program("0: 0F0 0B0\n1: 1F0 1B0\n")
    times = np.array([0.0, 6, 1, 3])
    settings = TracedCosts(TracedStep(program, times, times + np.array([1, 2, 2, 3]))).auto_schedule_settings(2)
    assert settings["slices"] == [[0.5, 1.0, 0.5, 0.5]] * 2 + [[1.0, 1.5, 0.75, 0.75]] * 2
