"""Policies of recomputation: the same bits under every schedule and on every mesh, and fewer activations."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from drawloom.components.pipeline.schedules.auto import Auto, Recomputation
from drawloom.components.ports.model import Head, LayerRange, TokenContext
from drawloom.components.ports.stages import Recompute
from drawloom.components.stages.checks import fault_of_policy, notes_of_policy
from drawloom.kernels import recompute_policy
from drawloom.kernels.recompute import rerun
from drawloom.kernels.recompute_policy import make_recomputable, recomputing
from support import pipelines
from support.pipelines import Recomputing, schedule
from support.processes import run_ranks
from support.qwen3 import dense, sparse

POLICIES: list[Recompute] = ["none", "blocks", 2, "selective"]
FLOAT32 = {"parameter": "float32"}


def assert_same_bits(steps: Sequence[Mapping[str, Any]], cases: Sequence[pipelines.Case]) -> None:
    """Losses, gradients and weights of each case and policy are bitwise those without recomputation."""
    assert len(steps) == len(POLICIES) * len(cases)
    for number, found in enumerate(steps):
        plain, place = steps[number % len(cases)], (POLICIES[number // len(cases)], cases[number % len(cases)])
        assert [found[key] for key in ("loss", "norm", "held_out")] == [
            plain[key] for key in ("loss", "norm", "held_out")
        ], place
        for what in ("grads", "weights"):
            assert found[what].keys() == plain[what].keys()
            for name, tensor in found[what].items():
                other = plain[what][name]
                assert tensor is other is None or torch.equal(tensor, other), (place, name)


SHORT = Auto(
    slices=[1.0, 1.0, 1.0, 1.5],
    memory=1.0,
    activations=[0.5] * 4,
    microbatches=4,
    recompute={"blocks": Recomputation(again=0.9, kept=0.1), "selective": Recomputation(again=0.1, kept=0.7)},
)
"""The schedule that is searched for, short of memory."""


def test_stages_that_recompute_by_themselves_have_the_same_bits() -> None:
    """On two ranks in float64, what a program says of each stage changes no bit of losses, gradients and weights."""
    policies = SHORT.program(2, 4).recompute
    assert len({*policies}) > 1 and policies != ("none",) * len(policies)
    v, plain, least = schedule("zero_bubble_v"), Recomputing(SHORT), Recomputing(SHORT, policies)
    pairs = [(Recomputing(v), Recomputing(v, ("blocks", "selective", 2, "none"))), (plain, least)]
    cases: list[pipelines.Case] = [(each, 4, True, False, "smoothed") for pair in pairs for each in pair]
    for found in run_ranks(pipelines.steps, 2, cases, {}, "cpu", pipelines.FLOAT64, 2, 8, timeout=120):
        for without, recomputed in (found[:2], found[2:]):
            assert [without[key] for key in ("loss", "norm", "held_out")] == [
                recomputed[key] for key in ("loss", "norm", "held_out")
            ]
            for what in ("grads", "weights"):
                assert without[what].keys() == recomputed[what].keys()
                for name, tensor in without[what].items():
                    assert tensor is recomputed[what][name] is None or torch.equal(tensor, recomputed[what][name]), name


@pytest.mark.parametrize(
    ("policies", "blocks"),
    [((), 0), (("blocks", "none"), 2), (("none", "blocks"), 2), ((2, "blocks"), 3), (("selective", 2), 1)],
)
def test_each_stage_recomputes_what_its_program_says(
    policies: tuple[Recompute, ...], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two layers in each stage, as many blocks of a microbatch run again as the stages' policies say."""
    ran: list[Any] = []

    def counted(forward: Any, *given: Any, **named: Any) -> Any:
        ran.append(forward)
        return rerun(forward, *given, **named)

    monkeypatch.setattr(recompute_policy, "rerun", counted)
    pipelines.steps([(Recomputing(schedule("zero_bubble_v"), policies), 3, False, False, "plain")], layers=4)
    assert len(ran) == 3 * blocks


ALONE: list[pipelines.Case] = [
    *((name, 2, True, False, "smoothed") for name in pipelines.TRAINING),
    ("zero_bubble_v", 3, False, True, "tempered"),
    ("dual_pipe_v", 3, False, False, "states"),
]


def test_every_schedule_has_the_same_bits() -> None:
    """On one rank, a step of every schedule in float32, with tied and frozen weights."""
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
    """Two steps under each policy have the same bits on all ranks."""
    lengths = (4, 4) if {"context", "tensor"} & sizes.keys() else (4, 1)
    common = sizes, "cpu", dtypes, 2, 4, lengths, 8 if "expert" in sizes else 0, POLICIES
    for found in run_ranks(pipelines.steps, ranks, TOGETHER, *common, timeout=120):
        assert_same_bits(found, TOGETHER)


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=[pytest.mark.soak] if mesh == "data_shard" else []) for mesh in MESHES]
)
def test_every_mesh_has_the_same_bits(mesh: str) -> None:
    """On two ranks that share out stages, slices of parameters, gathered by block, or experts; in mixed precision."""
    check_mesh(*MESHES[mesh], pipelines.MIXED)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MORE_MESHES)
def test_more_meshes_have_the_same_bits(mesh: str) -> None:
    """On ranks that share out rows, products, tokens, experts, or stages and slices of parameters; in float32."""
    check_mesh(*MORE_MESHES[mesh], FLOAT32)


def losses_of(model: Any, policy: Recompute) -> tuple[Any, Any]:
    """A model, and a function that gives the losses of some rows under a policy."""
    torch.manual_seed(0)
    layers = model.num_hidden_layers
    module = model.build(LayerRange(0, layers, embedding=True, head=True))
    for name, parameter in module.named_parameters():
        model.initialise(name, parameter, 1)
    make_recomputable(model.blocks(module))
    tokens = torch.arange(256).view(2, 128) % 7
    positions = torch.arange(128).expand(2, 128)
    shared = TokenContext(positions, torch.zeros_like(tokens), torch.ones(tokens.shape))

    def finish(hidden: Tensor, head: Head) -> Tensor:
        return head.token_losses(hidden, tokens, None)[0]

    def losses() -> Tensor:
        with recomputing(policy):
            return module(tokens, shared, finish)  # type: ignore[no-any-return]

    return module, losses


def kept_bytes(losses: Any) -> int:
    """Bytes that a forward pass leaves allocated, as the profiler counts them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as running:
        output = losses()
    kept: int = sum(event.self_cpu_memory_usage for event in running.key_averages())
    del output
    return kept


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_policies_keep_less(kind: str) -> None:
    """Of the layers' activations, "blocks" keeps a tenth at most, 2 about half, "selective" four fifths at most."""
    made = dense if kind == "dense" else sparse
    sizes = {"num_hidden_layers": 4, "vocab_size": 7, "tie_word_embeddings": True}
    kept, grads = {}, {}
    for policy in POLICIES:
        module, losses = losses_of(made(**sizes), policy)
        losses()  # the first pass of a process allocates more
        kept[policy] = kept_bytes(losses)
        losses().sum().backward()
        grads[policy] = [parameter.grad for parameter in module.parameters()]
    assert all(map(torch.equal, grads[policy], grads["none"]) for policy in POLICIES)
    assert kept["blocks"] < 0.2 * kept["none"]
    assert 0.4 * kept["none"] < kept[2] < 0.7 * kept["none"]
    assert kept["selective"] < 0.8 * kept["none"]


def test_evaluation_is_not_wrapped() -> None:
    """Without gradients a block runs as it is, whatever the policy."""
    _, losses = losses_of(dense(), "blocks")
    with torch.inference_mode():
        evaluated = losses()
    assert torch.equal(evaluated, losses())


def test_policies_are_told_in_words() -> None:
    """`explain` says what is kept and what runs again, and `check` refuses a number of blocks that is none."""
    assert list(notes_of_policy("none")) == []
    assert "norms, gates and rotations run again" in next(notes_of_policy("selective"))
    assert "of each block only the input is kept" in next(notes_of_policy("blocks"))
    assert "of one of 3 blocks" in next(notes_of_policy(3))
    assert fault_of_policy(0) == "0 is not above 0" and fault_of_policy(1) is fault_of_policy("blocks") is None
