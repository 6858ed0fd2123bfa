"""Floors of planned steps."""

import attrs
import pytest
import tomli

from drawloom import Recipe
from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.planning.floor import UPDATE, WAITING, WHOLE_STEP, MeasuredStep, compute_floor, list_floor_rows
from drawloom.components.planning.plan import plan
from drawloom.components.planning.stage_costs import ATTENTION, ELEMENTWISE, OPERATIONS, PRODUCTS

NOTHING = MeasuredStep("nothing")

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER, LENGTH, ROWS = 3, 48, 4, 2, 16, 80, 64, 8
SIZES = (
    *(f"model.num_hidden_layers={LAYERS}", f"model.hidden_size={HIDDEN}", f"model.num_attention_heads={HEADS}"),
    *(f"model.num_key_value_heads={KV_HEADS}", f"model.head_dim={HEAD}", f"model.intermediate_size={INNER}"),
    *(f"vars.length={LENGTH}", f"batch.global_size={ROWS}", "batch.micro_size=4"),
)
EXPERTS = ("model.num_experts=4", "model.moe_intermediate_size=64")


def test_bounds_of_a_dense_model_follow_from_its_shapes() -> None:
    """
    A product of T tokens with a weight (in, out) takes 6 T in out FLOPs and, three times, moves both factors and the
    result; attention takes two products of all pairs, and five backward; AdamW moves 7 numbers per weight, and the
    division of gradients 2.
    """
    device = find_device_model("cpu")
    planned = plan(Recipe.load("first_run", *SIZES), device)
    rows = {row.kind: row for row in list_floor_rows(planned, NOTHING)}
    projections = [(HIDDEN, HEADS * HEAD), *[(HIDDEN, KV_HEADS * HEAD)] * 2, (HEADS * HEAD, HIDDEN)]
    shapes = LAYERS * [*projections, *[(HIDDEN, INNER)] * 3]
    elements = sum(width * other for width, other in shapes)
    weights = planned.elements[0].all
    head = weights - elements - LAYERS * (2 * HIDDEN + 2 * HEAD) - HIDDEN  # the embedding, without norms
    shapes.append((HIDDEN, head // HIDDEN))
    tokens, micro = ROWS * LENGTH, 4 * LENGTH
    peak, bandwidth = device.peaks["float32"], device.bandwidth
    assert rows[PRODUCTS].flops == pytest.approx(6 * tokens * (elements + head) / peak)
    moved = sum(micro * (width + other) + width * other for width, other in shapes)
    assert rows[PRODUCTS].memory == pytest.approx(tokens / micro * 3 * moved * 4 / bandwidth, rel=0.01)
    pairs = tokens * (LENGTH + 1) / 2
    assert rows[ATTENTION].flops == pytest.approx(LAYERS * HEADS * 7 * 2 * pairs * HEAD / peak)
    assert rows[UPDATE].memory == rows[UPDATE].floor == pytest.approx(9 * weights * 4 / bandwidth)


@pytest.mark.parametrize(
    ("recipe", "device", "words"),
    [
        ("first_run", "h200", ("mesh.data_shard=2", "mesh.data_replicate=2", "batch.micro_size=2")),
        ("first_run", "h100", ("mesh.pipeline=3", "mesh.tensor=2")),
        ("first_run", "cpu", ("optimizer.use=optim.muon", "optimizer.lr=0.1")),
        ("moe", "h100", (*EXPERTS, "mesh.data_shard=2", "mesh.expert=2")),
        ("moe", "cpu", (*EXPERTS, "mesh.context=2", "stages.recompute=blocks")),
    ],
)
def test_rows_add_up_to_the_step_and_its_floor(recipe: str, device: str, words: tuple[str, ...]) -> None:
    """Planned seconds add up to the plan's step; floors add up to operations, or links, and are below it."""
    planned = plan(Recipe.load(recipe, *SIZES, *words), find_device_model(device))
    *rows, step = list_floor_rows(planned, NOTHING)
    assert sum(row.planned for row in rows) == pytest.approx(step.planned) == pytest.approx(planned.time.seconds)
    operations = [row for row in rows if row.kind in (*OPERATIONS, UPDATE)]
    links = sum(row.links for row in rows if row not in operations)
    assert links > 0 or planned.ranks == 1
    assert step.floor == pytest.approx(max(sum(row.floor for row in operations), links))
    assert 0 < step.floor < step.planned
    assert all(max(row.flops, row.memory) <= row.floor <= row.planned for row in operations)


def test_bounds_of_messages_do_not_depend_on_what_is_reached() -> None:
    """Slower messages take more planned seconds, and as many at the links' rates: layers' and parameters' messages."""
    device = find_device_model("h200")
    slow = attrs.evolve(device, reached=attrs.evolve(device.reached, links=0.1, latency=1e-3))
    recipe = Recipe.load("first_run", *SIZES, "mesh.data_shard=2", "mesh.tensor=2")
    fast_rows, slow_rows = (
        {row.kind: row for row in list_floor_rows(plan(recipe, model), NOTHING)} for model in (device, slow)
    )
    for kind in ("tensor", "parameters over data_shard"):
        assert 0 < slow_rows[kind].links == pytest.approx(fast_rows[kind].links)
        assert slow_rows[kind].planned > 2 * fast_rows[kind].planned


def test_gains_of_settings_are_those_of_plans_with_them() -> None:
    """A setting's step is the plan of the recipe with its TOML lines; it fits, and no key is in two gaps."""
    recipe, device = Recipe.load("first_run", *SIZES, "batch.micro_size=1"), find_device_model("h100")
    planned = plan(recipe, device)
    floor = compute_floor(recipe, planned, None)
    gaps = [gap.seconds - gap.floor for gap in floor.gaps]
    assert gaps == sorted(gaps, reverse=True)
    settings = [gap.faster for gap in floor.gaps if gap.faster]
    assert len(settings) >= 2
    for faster in settings:
        again = plan(recipe.with_values(tomli.loads("\n".join(faster.toml))), device, planned.ranks)
        assert (again.time.seconds, again.peak_bytes) == (faster.step_seconds, faster.peak_memory_bytes)
        assert again.fits and again.time.seconds < planned.time.seconds
    keys = [line.partition(" = ")[0] for faster in settings for line in faster.toml]
    assert len(keys) == len(set(keys))
    assert all(line in str(floor) for faster in settings for line in faster.toml)


def test_measured_seconds_replace_planned_ones() -> None:
    """A row's seconds are the measured ones, and waiting beyond the plan's has a row; rows add up to the step."""
    recipe, device = Recipe.load("first_run", *SIZES), find_device_model("h100")
    planned = plan(recipe, device)
    seconds = {PRODUCTS: 1.0, ATTENTION: 0.5, ELEMENTWISE: 0.25, UPDATE: 0.25, WAITING: 3.0, WHOLE_STEP: 5.0}
    *rows, step = list_floor_rows(planned, MeasuredStep("a trace", seconds))
    assert sum(row.seconds for row in rows) == pytest.approx(step.seconds) == pytest.approx(5.0)
    launches = next(row for row in rows if row.kind == "launches by the host")
    assert rows[-1].seconds == pytest.approx(3.0 - launches.planned)
