"""Plans against real steps: planned memory is a run's memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from drawloom import Recipe, RecipeError
from drawloom.components.commands.planning.plan import make_plan_fields
from drawloom.components.distributed.device_model import Link, find_device_model
from drawloom.components.optim.stochastic_adamw import CODES_ARITHMETIC
from drawloom.components.pipeline.runtime.stage_runner import StageRunner
from drawloom.components.planning.attention import AttentionFractions
from drawloom.components.planning.plan import Plan, plan
from drawloom.components.planning.stage_costs import Recorder
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.features import sum_memory_by_kind
from drawloom.graph import UserError
from support.processes import run_ranks
from support.steps import prepare_weights
from support.stores import store_of

ROWS, LENGTH = 4, 64

DENSE = (
    *("model.num_hidden_layers=3", "model.hidden_size=48", "model.num_attention_heads=4"),
    *("model.num_key_value_heads=2", "model.head_dim=16", "model.intermediate_size=80", "vars.length=64"),
    *("batch.global_size=8", "batch.micro_size=4", "device.kind=cpu"),
)
EXPERTS = (
    *("model.num_hidden_layers=2", "model.hidden_size=48", "model.num_attention_heads=4", "vars.length=64"),
    *("model.num_experts=4", "model.moe_intermediate_size=64", "batch.global_size=8", "batch.micro_size=4"),
    "device.kind=cpu",
)
MIXED = ("precision.compute=bfloat16", "precision.gradient=float32", 'precision.uncast=["*norm.weight"]')

ADAPTERS = ('lora={use="adapters.lora",targets=["*_proj"],rank=4,alpha=8.0}', 'stages.adapters=["@lora"]')
NF4 = ("model.hidden_size=64", "model.intermediate_size=64", "quantized.use=frozen_weights.quantized")
OFFLOADED = (
    *("precision.parameter=bfloat16", "optimizer.use=optim.stochastic_adamw", "optimizer.lr=1e-3"),
    *("optimizer.state_dtype=float32", "optimizer.split_master_weights=true", "optimizer.states=host"),
)
MUON = ("optimizer.use=optim.muon", "optimizer.lr=0.02")

RECIPES = {
    "dense": ("first_run", DENSE),
    "untied": ("first_run", (*DENSE, "model.tie_word_embeddings=false")),
    "experts": ("moe", EXPERTS),
    "mixed": ("first_run", (*DENSE, *MIXED)),
    "mixed experts": ("moe", (*EXPERTS, *MIXED)),
    "float8": ("first_run", (*DENSE, *MIXED, "float8.use=float8.training")),
    "float8 once a step": ("first_run", (*DENSE, *MIXED, "float8.use=float8.training", "float8.round_weights=step")),
    "bfloat16": (
        "first_run",
        (*DENSE, "precision.parameter=bfloat16", "optimizer.use=optim.stochastic_adamw", "optimizer.lr=1e-3"),
    ),
    "selective": ("first_run", (*DENSE, "stages.recompute=selective")),
    "quantized": ("first_run", (*DENSE, "stages.recompute=quantized")),
    "quantized experts": ("moe", (*EXPERTS, *MIXED, "stages.recompute=quantized")),
    "blocks": ("moe", (*EXPERTS, "stages.recompute=blocks")),
    "adapters": ("first_run", (*DENSE, *ADAPTERS)),
    "mixed adapters": ("first_run", (*DENSE, *ADAPTERS, *MIXED)),
    "quantized adapters": ("first_run", (*DENSE, *ADAPTERS, *MIXED[:2], *NF4)),
    "offloaded": ("first_run", (*DENSE, *OFFLOADED)),
    "muon": ("moe", (*EXPERTS, *MUON)),
    "every second block": ("first_run", (*DENSE, "stages.recompute=2")),
}


def plan_recipe(name: str, *words: str, ranks: int | None = None, recipe: str = "first_run") -> Plan:
    """Plan one of the recipes, or another with these words, for the CPU."""
    base, given = RECIPES.get(name, (recipe, ()))
    return plan(Recipe.load(base, *given, *words), find_device_model("cpu"), ranks)


def by_kind(*users: Any) -> dict[str, int]:
    """Return a run's bytes by memory kind."""
    return {str(kind): size for kind, size in sum_memory_by_kind(users).items()}


def batch() -> TokenBatch:
    """Return a microbatch with whole rows, one document apiece."""
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 199
    zeros = torch.zeros_like(tokens)
    return TokenBatch(tokens, tokens, tokens % LENGTH, zeros, torch.ones(ROWS, LENGTH))


class Saved:
    """Distinct memory kept by autograd, without parameters."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self.bytes = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.known.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


@pytest.mark.parametrize("name", RECIPES)
def test_planned_memory_equals_that_of_a_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, masters, copies, gradients and moments to the byte; activations of a real step within 10 %."""
    monkeypatch.chdir(tmp_path)
    run_plan = plan_recipe(name)
    [memory] = run_plan.memory
    base, words = RECIPES[name]
    with Recipe.load(base, *words).open(["stages", "optimizer", "loss"]) as run:
        stages = run["stages"]
        bytes_by_kind = by_kind(stages, run["optimizer"])
        assert {**memory.persistent, "gradients": memory.gradients} == bytes_by_kind
        [stage] = stages.local
        prepare_weights(stages)
        saved = Saved([*stage.module.parameters(), *stage.module.buffers()])
        recorder = Recorder(run_plan.device, lambda _: Link(1.0), AttentionFractions(0.5))
        runner = StageRunner(stage, run["loss"])
        given = batch()
        tokens, shared = run["loss"].inputs(given)
        for parameter in filter(lambda weight: weight.requires_grad, stage.module.parameters()):
            parameter.grad = torch.zeros_like(parameter, dtype=stages.precision.gradient)
        if stage.recompute == "none":  # its own hooks would take the place of these
            with saved_tensors_hooks(saved, lambda tensor: tensor):
                runner.forward(0, tokens, shared, given)
            assert run_plan.costs[0].passes["F"].total_kept_bytes == pytest.approx(saved.bytes, rel=0.1)
            runner.backward(0, None)
        with recorder:
            recorder.begin_pass()
            runner.forward(0, tokens, shared, given)
            forward = recorder.end_pass()
            recorder.begin_pass()
            runner.backward(0, None)
            backward = recorder.end_pass()
    passes = run_plan.costs[0].passes
    assert passes["F"].total_kept_bytes == pytest.approx(forward.total_kept_bytes, rel=0.05)
    assert passes["F"].peak_delta == pytest.approx(forward.peak_delta, rel=0.1)
    # What goes beyond what the forward pass has left is small, so that all of it is compared.
    peak = forward.total_kept_bytes + backward.peak_delta
    assert passes["F"].total_kept_bytes + passes["B"].peak_delta == pytest.approx(peak, rel=0.1)
    assert memory.step.bytes == pytest.approx(peak + bytes_by_kind["gradients"], rel=0.1)


def _persistent_bytes(base: str, words: Sequence[str]) -> dict[str, int]:
    """Return this rank's bytes by kind."""
    with Recipe.load(base, *words).open(["stages", "optimizer"]) as run:
        return by_kind(run["stages"], run["optimizer"])


MESHES: list[tuple[str, tuple[str, ...]]] = [
    ("mixed experts", ("mesh.data_shard=2", "stages.reshard_after_forward=false")),
    ("dense", ("mesh.tensor=2", "model.vocab_size=261")),
    ("experts", ("mesh.data_shard=2", "mesh.expert=2", 'stages.dispatcher={use="experts.all_to_all"}')),
    ("dense", ("mesh.pipeline=2", "schedule.use=pipeline.schedules.zero_bubble_v", "model.num_hidden_layers=5")),
]


@pytest.mark.parametrize(("name", "words"), MESHES, ids=["shards", "tensor", "experts", "pipeline"])
def test_memory_of_ranks_of_a_mesh_is_planned(
    name: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards, parts of matrices, experts and stages on two real ranks are planned to the byte."""
    monkeypatch.chdir(tmp_path)
    base, given = RECIPES[name]
    bytes_by_rank = run_ranks(_persistent_bytes, 2, base, (*given, *words))
    views = [
        {**memory.persistent, "gradients": memory.gradients} for memory in plan_recipe(name, *words, ranks=2).memory
    ]
    # Ranks that differ in data or tensors are planned as the first of them, which has most.
    assert views == bytes_by_rank[: len(views)]


def test_memory_of_a_pipeline_falls_with_the_microbatches_that_a_rank_holds() -> None:
    """In 1F1B the first of four ranks holds four microbatches, the last one, and all peaks are in a backward pass."""
    words = ("mesh.pipeline=4", "model.num_hidden_layers=4", "batch.global_size=32", "model.tie_word_embeddings=false")
    pipeline_plan = plan_recipe("dense", *words, ranks=4)
    first, second, third, _ = (sum(memory.activation_bytes_at_peak.values()) for memory in pipeline_plan.memory)
    middle = pipeline_plan.costs[1].passes["F"].total_kept_bytes
    assert second - third == pytest.approx(middle, rel=0.01)
    assert first > second
    assert [memory.action_at_peak[1] for memory in pipeline_plan.memory] == ["B"] * 4


def test_layers_beyond_the_first_of_a_kind_count_as_often_as_there_are() -> None:
    """A deeper model's needs grow by the same amount with every layer: in bytes, operations and seconds."""
    sizes = [plan_recipe("dense", f"model.num_hidden_layers={layers}") for layers in (1, 2, 40)]
    for measure in ("seconds", "flops", "total_kept_bytes"):
        one, two, many = (getattr(sized_plan.costs[0].passes["F"], measure) for sized_plan in sizes)
        assert many == pytest.approx(one + 39 * (two - one))


def test_operations_are_near_the_formula_of_the_model() -> None:
    """Forward and backward products, counted as they run, exceed the model's formula by at most 10 %."""
    for name in ("dense", "experts"):
        model_plan = plan_recipe(name)
        run = sum(model_plan.costs[0].passes[op].flops for op in "FB") * model_plan.microbatches
        # Attention's scores are computed again in its backward pass, which the formula leaves out.
        assert model_plan.flops is not None
        assert model_plan.flops <= run <= 1.1 * model_plan.flops


def test_the_parts_of_a_step_add_up() -> None:
    """A pipeline without messages takes its passes and the bubble of 1F1B, (p - 1) of m + p - 1 microbatches."""
    words = ("mesh.pipeline=2", "model.num_hidden_layers=4", "batch.global_size=32")
    pipeline_plan = plan_recipe("untied", *words, ranks=2)
    time = pipeline_plan.time
    assert time.seconds == pytest.approx(sum(value for name, value in attrs.asdict(time).items() if name != "sending"))
    assert 0.5 / (pipeline_plan.microbatches + 1) < time.bubble / time.seconds < 3 / (pipeline_plan.microbatches + 1)


def test_cuda_graphs_take_no_time_of_the_host() -> None:
    """With CUDA graphs a small model's passes take the GPU's time, far less than the host's."""
    plain, captured = (
        plan(Recipe.load("first_run", *DENSE[:-1], *words), find_device_model("h200")).time.compute
        for words in ((), ("capture.use=pipeline.captured",))
    )
    assert captured < 0.2 * plain


def test_graphs_keep_the_gradients_of_whole_parameters() -> None:
    """With CUDA graphs they are beside all activations; shards' gradients, summed after the passes, are not."""
    device = find_device_model("h200")
    for shards in (1, 2):
        words = (*DENSE[:-1], f"mesh.data_shard={shards}", f"batch.micro_size={8 // shards}")
        plain, captured = (
            plan(Recipe.load("first_run", *words, *graphs), device, shards).memory[0].step.bytes
            for graphs in ((), ("capture.use=pipeline.captured",))
        )
        assert captured > plain if shards == 1 else captured == plain


def test_gradients_are_sent_only_if_their_weights_are_trained_and_sharded() -> None:
    """With adapters on frozen weights, and for experts that a rank has alone, few bytes of gradients are sent."""
    device = find_device_model("h200")
    device = attrs.evolve(device, reached=attrs.evolve(device.reached, latency=0.0))
    expert = "mesh.expert=2", 'stages.dispatcher={use="experts.symmetric"}'
    for name, fewer in (("dense", ADAPTERS), ("experts", expert)):
        recipe, settings = RECIPES[name]
        whole, part = (
            plan(Recipe.load(recipe, *settings[:-1], "mesh.data_shard=2", *words), device, 2)
            .exchanges[0]
            .reduced_once.planned
            for words in ((), fewer)
        )
        assert part < 0.5 * whole, name


def test_a_device_waits_where_the_host_counts_rows_of_experts() -> None:
    """Without a capacity passes forward take longer, unless CUDA graphs or a fast host issue their operations."""
    device = find_device_model("h200")
    recipe, settings = RECIPES["experts"]
    words = *settings[:-1], "mesh.data_shard=2", "mesh.expert=2", "dispatcher.use=experts.symmetric"
    seconds = [
        plan(Recipe.load(recipe, *words, *capacity), model, 2).costs[0].passes["F"].seconds
        for model in (device, device.without_host_time())
        for capacity in ((), ("dispatcher.capacity=1.0",))
    ]
    assert seconds[0] > 1.5 * seconds[1]
    assert seconds[1:] == [seconds[1]] * 3


def test_a_capacity_has_room_for_rows_of_experts() -> None:
    """With room for twice the rows, experts keep twice the bytes until the backward pass, and the rest as much."""
    recipe, settings = RECIPES["experts"]
    words = *settings[:-1], "mesh.data_shard=2", "mesh.expert=2", "dispatcher.use=experts.symmetric"
    once, twice = (
        plan(Recipe.load(recipe, *words, f"dispatcher.capacity={capacity}"), find_device_model("h200"), 2)
        for capacity in (1.0, 2.0)
    )
    kept, more = (planned.costs[0].passes["F"].kept_bytes for planned in (once, twice))
    assert more["mlp"] > 1.5 * kept["mlp"]
    assert {**more, "mlp": 0} == {**kept, "mlp": 0}


def test_products_of_an_optimizer_are_part_of_the_update() -> None:
    """Muon's products are divided over the ranks with shards of its matrices."""
    adam, one, two = (
        plan_recipe(name, "batch.micro_size=1", f"mesh.data_shard={shards}").time.update
        for name, shards in (("experts", 1), ("muon", 1), ("muon", 2))
    )
    assert adam < 0.1 * one
    assert two == pytest.approx(one / 2, rel=0.05)


@pytest.mark.parametrize("words", [(), ("optimizer.use=optim.sgd", "optimizer.lr=0.1")])
def test_updates_read_gradients_after_norm_and_scaling(words: tuple[str, ...]) -> None:
    """An update takes as long as the traffic of gradients (read, written and read), weights and state."""
    device = find_device_model("h200")
    planned = plan(Recipe.load("first_run", *DENSE[:-1], *words, "capture.use=pipeline.captured"), device)
    persistent = planned.memory[0].persistent
    traffic = 3 * planned.memory[0].gradients + 2 * persistent["parameters"]
    traffic += 2 * persistent.get("optimizer_state", 0)
    assert planned.time.update == pytest.approx(traffic / (device.bandwidth * device.reached.memory), rel=0.02)


def test_means_of_8_bits_are_limited_by_arithmetic() -> None:
    """An update moves fewer bytes than with bfloat16 means, and takes longer: the norm, and operations at the peak."""
    device = find_device_model("h200")
    words = (*DENSE[:-1], *OFFLOADED[:3], "capture.use=pipeline.captured")
    narrow, codes = (
        plan(Recipe.load("first_run", *words, f"optimizer.state_dtype={dtype}"), device)
        for dtype in ("bfloat16", "uint8")
    )
    weights = codes.elements[0].all
    assert codes.memory[0].persistent["optimizer_state"] < narrow.memory[0].persistent["optimizer_state"]
    assert codes.time.update > 1.15 * narrow.time.update
    # norm and scaling read and write the gradients
    norm = 2 * codes.memory[0].gradients / (device.bandwidth * device.reached.memory)
    arithmetic = CODES_ARITHMETIC * weights / device.peaks["float32"]
    assert codes.time.update == pytest.approx(norm + arithmetic, rel=0.02)


def test_state_in_host_memory_takes_the_time_of_the_link() -> None:
    """Ten bytes per weight are on the host instead of the GPU, except for slots, and an update takes their transfer."""
    base = (
        "vars.data=store",
        "vars.tokenizer=folder",
        "precision.uncast=[]",
        "precision.gradient=bfloat16",
        *OFFLOADED,
    )
    resident, offloaded = (
        plan(Recipe.load("qwen3_0_6b", *base[:-1], f"optimizer.states={where}"), find_device_model("h200"))
        for where in ("device", "host")
    )
    weights = resident.elements[0].all
    assert [memory.host for memory in (*resident.memory, *offloaded.memory)] == [0, 10 * weights]
    assert offloaded.time.update == pytest.approx(10 * weights / 50e9)
    assert offloaded.time.update > 10 * resident.time.update
    assert resident.memory[0].persistent["optimizer_state"] == 10 * weights
    assert offloaded.memory[0].persistent["optimizer_state"] == 3 * 2**28
    assert offloaded.memory[0].host == 10 * weights


def test_a_plan_charges_the_link_for_offloaded_activations() -> None:
    """A fast link costs nothing, and a slow one as much as the simulation with these transfers; memory shrinks."""
    words = ("mesh.pipeline=2", "schedule.use=pipeline.schedules.gpipe", "batch.micro_size=1")
    recipe = Recipe.load("first_run", *DENSE, *words)
    device, offload = find_device_model("cpu"), {"offload": {"use": "pipeline.offloaded"}}
    resident, fast, slow = (
        plan(recipe.with_values(tables), attrs.evolve(device, host_link=link))
        for tables, link in (({}, 1.0), (offload, 1e15), (offload, 1e7))
    )
    assert resident.time.offload == 0.0
    assert fast.time.offload == pytest.approx(0.0, abs=1e-6)
    assert slow.time.offload == pytest.approx(slow.time.seconds - resident.time.seconds)
    assert slow.time.offload > 6 * slow.costs[0].passes["F"].total_kept_bytes / 1e7 / 2
    assert max(fast.peak_memory_bytes) < max(resident.peak_memory_bytes)


PACKED = ("vars.tokenizer=none", *DENSE[:5], "model.intermediate_size=80", "batch.global_size=8", "batch.micro_size=2")


def test_attention_of_packed_rows_uses_the_kernel_and_documents_of_a_run(tmp_path: Path) -> None:
    """
    A store at hand has the documents' lengths: shorter ones have fewer pairs, at the packed kernel's rate. A kernel
    named in the recipe has this rate on whole rows, too; a CPU has one rate for all.
    """
    store_of(tmp_path / "store", [["a" * 2999, "b" * 4999]])

    def seconds(corpus: str, *words: str, device: str = "h200") -> tuple[float, float]:
        recipe = Recipe.load("qwen3_0_6b", f"vars.data={tmp_path / corpus}", *PACKED, *words)
        packed_plan = plan(recipe, find_device_model(device))
        assert make_plan_fields(packed_plan)["document_tokens"] == (4000 if corpus == "store" else None)
        return packed_plan.costs[0].passes["F"].seconds, packed_plan.flops or 0.0

    long = "vars.length=4096"
    whole, packed, flex = seconds("none", long), seconds("store", long), seconds("none", long, "kernels.attention=flex")
    assert packed[1] < whole[1] == flex[1]  # operations inside of documents
    assert whole[0] < packed[0] < flex[0]
    captured = seconds("store", long, "capture.use=pipeline.captured")[0]
    assert packed[0] < captured < flex[0]
    assert seconds("store", "vars.length=40000")[0] < seconds("none", "vars.length=40000")[0]
    assert seconds("store", long, device="cpu")[0] == seconds("none", long, device="cpu")[0]


FAULTS: list[tuple[tuple[str, ...], int | None, str]] = [
    (("mesh.data_shard=2",), 3, "needs a multiple of .* there are 3; write --ranks 2"),
    ((), 3, "write a multiple of 3"),
    (("mesh.data_shard=3",), None, "global_size = 6 or 9"),
]


@pytest.mark.parametrize(("words", "ranks", "reason"), FAULTS)
def test_a_plan_that_does_not_fit_its_mesh_is_an_error(words: tuple[str, ...], ranks: int | None, reason: str) -> None:
    """The error is a sentence with a remedy."""
    with pytest.raises((UserError, RecipeError), match=reason):
        plan_recipe("dense", *words, ranks=ranks)


def test_float8_is_planned_with_less_time_and_memory() -> None:
    """On an H200 passes of a wide layer are a third faster in float8 with less memory; kept weights need more."""
    pytest.importorskip("triton")
    words = (
        *("model.num_hidden_layers=2", "model.hidden_size=4096", "model.num_attention_heads=32", "vars.length=4096"),
        *("model.num_key_value_heads=8", "model.head_dim=128", "model.intermediate_size=14336", "batch.global_size=2"),
        *("batch.micro_size=2", "device.kind=cuda", *MIXED),
    )
    formats = ((), ("float8.use=float8.training",), ("float8.use=float8.training", "float8.round_weights=step"))
    plans = [plan(Recipe.load("first_run", *words, *added), find_device_model("h200"), 1) for added in formats]
    plain, in_passes, once = [sum(step.costs[0].passes[op].seconds for op in "FB") for step in plans]
    assert once < in_passes < plain / 1.3
    memory = [step.peak_memory_bytes[0] for step in plans]
    copies = [step.memory[0].persistent["compute_copies"] for step in plans]
    assert memory[1] < memory[0] and copies[0] == copies[1]
    weights = 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    assert copies[2] - copies[1] == pytest.approx(2 * weights, rel=1e-3)
    assert memory[2] - memory[1] == pytest.approx(2 * weights, rel=1e-2)
