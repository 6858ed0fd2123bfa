"""Recomputation policies have the same bits on every mesh and schedule, and keep fewer activations."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from drawloom.components.pipeline.schedules.auto import Auto, Recomputation
from drawloom.components.ports.model import Head, LayerRange, TokenContext
from drawloom.components.ports.stages import Recompute
from drawloom.components.stages.checks import describe_recompute_fault
from drawloom.components.stages.materialized import MaterializedStages
from drawloom.components.stages.notes import describe_recompute_policy
from drawloom.kernels.recompute import repeated_calls
from drawloom.kernels.recompute.policy import apply_recompute_policy, make_recomputable
from drawloom.kernels.recompute.repeated_calls import call_with_recomputation
from support import pipelines
from support.pipelines import Recomputing, schedule
from support.processes import run_ranks
from support.qwen3 import dense, sparse

POLICIES: list[Recompute] = ["none", "blocks", 2, "selective"]
FLOAT32 = {"parameter": "float32"}


def assert_same_bits(steps: Sequence[Mapping[str, Any]], cases: Sequence[pipelines.Case]) -> None:
    """Assert that losses, gradients and weights are bitwise equal under all recompute policies."""
    assert len(steps) == len(POLICIES) * len(cases)
    for number, actual in enumerate(steps):
        plain, label = steps[number % len(cases)], (POLICIES[number // len(cases)], cases[number % len(cases)])
        assert [actual[key] for key in ("loss", "norm", "held_out")] == [
            plain[key] for key in ("loss", "norm", "held_out")
        ], label
        for kind in ("grads", "weights"):
            assert actual[kind].keys() == plain[kind].keys()
            for name, tensor in actual[kind].items():
                other = plain[kind][name]
                assert tensor is other is None or torch.equal(tensor, other), (label, name)


SHORT = Auto(
    slices=[1.0, 1.0, 1.0, 1.5],
    memory=1.0,
    activations=[0.5] * 4,
    microbatches=4,
    recompute={"blocks": Recomputation(again=0.9, kept=0.1), "selective": Recomputation(again=0.1, kept=0.7)},
)
"""Schedule found by a search with little memory."""


def test_programs_that_recompute_by_stage_have_the_same_bits() -> None:
    """On two ranks in float64, a program's policies by stage change no bit of losses, gradients and weights."""
    policies = SHORT.program(2, 4).recompute
    assert len({*policies}) > 1 and policies != ("none",) * len(policies)
    v, plain, searched = schedule("zero_bubble_v"), Recomputing(SHORT), Recomputing(SHORT, policies)
    pairs = [(Recomputing(v), Recomputing(v, ("blocks", "selective", 2, "none"))), (plain, searched)]
    cases: list[pipelines.Case] = [(program, 4, True, False, "smoothed") for pair in pairs for program in pair]
    for actual in run_ranks(pipelines.steps, 2, cases, {}, "cpu", pipelines.FLOAT64, 2, 8, timeout=120):
        for without, recomputed in (actual[:2], actual[2:]):
            assert [without[key] for key in ("loss", "norm", "held_out")] == [
                recomputed[key] for key in ("loss", "norm", "held_out")
            ]
            for kind in ("grads", "weights"):
                assert without[kind].keys() == recomputed[kind].keys()
                for name, tensor in without[kind].items():
                    assert tensor is recomputed[kind][name] is None or torch.equal(tensor, recomputed[kind][name]), name


@pytest.mark.parametrize(
    ("policies", "blocks"),
    [((), 0), (("blocks", "none"), 2), (("none", "blocks"), 2), ((2, "blocks"), 3), (("selective", 2), 1)],
)
def test_stages_recompute_as_their_program_says(
    policies: tuple[Recompute, ...], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two layers per stage, the policies of the stages determine how many blocks run again."""
    ran: list[Any] = []

    def rerun_and_count(forward: Any, *arguments: Any, **keywords: Any) -> Any:
        ran.append(forward)
        return call_with_recomputation(forward, *arguments, **keywords)

    monkeypatch.setattr(repeated_calls, "call_with_recomputation", rerun_and_count)
    pipelines.steps([(Recomputing(schedule("zero_bubble_v"), policies), 3, False, False, "plain")], layers=4)
    assert len(ran) == 3 * blocks


ALONE: list[pipelines.Case] = [
    *(
        (name, 2, True, False, "smoothed")
        for name in ("gpipe", "zero_bubble_1p", "zero_bubble_v", "dual_pipe_v", "circular")
    ),
    ("zero_bubble_v", 3, False, True, "tempered"),
    ("dual_pipe_v", 3, False, False, "states"),
    # the gated delta rule, sinks, and latent attention with experts
    *(("zero_bubble_v", 2, False, False, family) for family in ("qwen3_5", "gpt_oss", "deepseek_v3")),
]


def test_whole_and_split_backward_passes_have_the_same_bits() -> None:
    """On one rank in float32, with tied and frozen weights, no policy changes a bit."""
    steps = pipelines.steps(ALONE, dtypes=FLOAT32, layers=4, recompute=POLICIES)
    assert_same_bits(steps, ALONE)


TOGETHER: list[pipelines.Case] = [
    ("one_f_one_b", 4, True, False, "smoothed"),
    ("zero_bubble_v", 4, False, False, "plain"),
]
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "pipeline": (2, {}),
    "data_shard": (2, {"data_shard": 2}),
    "expert": (2, {"data_shard": 2, "expert": 2}),
}
MORE_MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "data_replicate": (2, {"data_replicate": 2}),
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "pipelines of shards": (4, {"data_shard": 2}),
    "expert": (2, {"data_shard": 2, "expert": 2}),
    "pipelines of experts": (4, {"data_shard": 2, "expert": 2}),
}


def check_mesh(ranks: int, sizes: dict[str, int], dtypes: Mapping[str, Any]) -> None:
    """Assert that two steps under all policies have the same bits on all ranks."""
    lengths = (4, 4) if {"context", "tensor"} & sizes.keys() else (4, 1)
    common = sizes, "cpu", dtypes, 2, 4, lengths, 8 if "expert" in sizes else 0, POLICIES
    for actual in run_ranks(pipelines.steps, ranks, TOGETHER, *common, timeout=120):
        assert_same_bits(actual, TOGETHER)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_has_the_same_bits(mesh: str) -> None:
    """On two ranks in mixed precision, pipelines, FSDP and experts are bitwise equal to a run without recomputation."""
    check_mesh(*MESHES[mesh], pipelines.MIXED)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MORE_MESHES)
def test_more_meshes_have_the_same_bits(mesh: str) -> None:
    """In float32, all other dimensions, and pipelines of shards, are bitwise equal to a run without recomputation."""
    check_mesh(*MORE_MESHES[mesh], FLOAT32)


def losses_of(model: Any, policy: Recompute) -> tuple[Any, Any]:
    """Return a model, and a function that returns the losses of some rows under a policy."""
    torch.manual_seed(0)
    layers = model.num_hidden_layers
    module = model.build(LayerRange(0, layers, embedding=True, head=True))
    for name, parameter in module.named_parameters():
        model.initialize_parameter(name, parameter, 1)
    make_recomputable(model.blocks(module))
    tokens = torch.arange(256).view(2, 128) % 7
    positions = torch.arange(128).expand(2, 128)
    shared = TokenContext(positions, torch.zeros_like(tokens), torch.ones(tokens.shape))

    def finish(hidden: Tensor, head: Head) -> Tensor:
        return head.token_losses(hidden, tokens, None)[0]

    def losses() -> Tensor:
        with apply_recompute_policy(policy):
            return module(tokens, shared, finish)  # type: ignore[no-any-return]

    return module, losses


def count_kept_bytes(losses: Any) -> int:
    """Return the bytes that a forward pass does not free, as the profiler counts them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as running:
        output = losses()
    kept: int = sum(event.self_cpu_memory_usage for event in running.key_averages())
    del output
    return kept


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_policies_keep_fewer_bytes(kind: str) -> None:
    """
    Policy "blocks" keeps at most a fifth of the activations, 2 about half, "selective" at most four fifths. "quantized"
    keeps less than "selective", with the same loss.
    """
    made = dense if kind == "dense" else sparse
    sizes = {"num_hidden_layers": 4, "vocab_size": 7, "tie_word_embeddings": True}
    kept, grads, results = {}, {}, []
    for policy in [*POLICIES, "quantized"]:
        module, losses = losses_of(made(**sizes), policy)
        losses()  # the first pass of a process allocates more
        kept[policy] = count_kept_bytes(losses)
        results.append(losses())
        results[-1].sum().backward()
        grads[policy] = [parameter.grad for parameter in module.parameters()]
    assert all(map(torch.equal, grads[policy], grads["none"]) for policy in POLICIES)
    assert kept["blocks"] < 0.2 * kept["none"]
    assert 0.4 * kept["none"] < kept[2] < 0.7 * kept["none"]
    assert kept["selective"] < 0.8 * kept["none"]
    assert kept["quantized"] < 0.85 * kept["selective"]
    assert all(torch.equal(losses, results[0]) for losses in results)


def test_resuming_with_other_gradients_is_reported() -> None:
    """To begin or to cease to round changes training; other policies do not."""
    impacts = {}
    for before in ("none", "quantized"):
        for after in ("blocks", "quantized"):
            node: Any = SimpleNamespace(settings={"recompute": after})
            impacts[before, after] = MaterializedStages.resume_impact(node, "recompute", before)
    assert impacts.pop(("none", "blocks")) is None
    assert {impact and impact[0] for impact in impacts.values()} == {"changes_training"}


def test_evaluation_is_not_wrapped() -> None:
    """Without gradients a block runs as under no policy."""
    _, losses = losses_of(dense(), "blocks")
    with torch.inference_mode():
        evaluated = losses()
    assert torch.equal(evaluated, losses())


def test_policies_are_explained() -> None:
    """`explain` names the tensors that are kept and the operations that run again; `check` refuses 0 blocks."""
    assert list(describe_recompute_policy("none")) == []
    assert "norms, gates and rotations run again" in next(describe_recompute_policy("selective"))
    assert "rounds gradients" in [*describe_recompute_policy("quantized")][-1]
    assert "of each block only the input is kept" in next(describe_recompute_policy("blocks"))
    assert "of one of 3 blocks" in next(describe_recompute_policy(3))
    assert (
        describe_recompute_fault(0) == "0 is not above 0"
        and describe_recompute_fault(1) is describe_recompute_fault("blocks") is None
    )
