"""Batch-invariant kernels on a GPU, in bfloat16: every operation, and whole GRPO steps with a cache."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.kernels.auto import AutoKernels
from drawloom.components.kernels.batch_invariant import BatchInvariantKernels
from drawloom.components.model.layers import LinearHead
from drawloom.components.parallel.tensor_ranks import ALONE
from drawloom.components.ports.rollouts import compute_policy_logps
from drawloom.graph import UserError
from drawloom.kernels.attention.options import AttentionOptions
from drawloom.kernels.batch_invariant.triton import BlockMask, attend_in_blocks_triton
from drawloom.kernels.cross_entropy.logsumexp import logsumexp_in_fixed_order
from drawloom.kernels.rope.frequencies import compute_rope_cos_and_sin
from runs.test_rollouts import LAYOUTS, RECIPE, SAMPLED
from support.gpu import drawloom_run
from support.processes import run_ranks
from support.runs import series

pytestmark = pytest.mark.gpu

GPU: Any = {"device": "cuda", "dtype": torch.bfloat16}
SIZES = (
    *("model.hidden_size=256", "model.head_dim=64", "model.num_attention_heads=4", "model.intermediate_size=512"),
    *(
        "precision.parameter=bfloat16",
        "kernels.use=kernels.batch_invariant",
        "rollouts.max_tokens=150",
        "trainer.steps=3",
    ),
    *("batch.global_size=8", "batch.micro_size=2", "evaluate.every=9", "optimizer.lr=1e-3", "device.share=false"),
)


@pytest.fixture
def kernels() -> Iterator[AutoKernels]:
    kernels = BatchInvariantKernels(device=ComputeDevice(kind="cuda"))
    kernels.open()
    yield kernels
    kernels.close()


def make_operations(kernels: AutoKernels) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Return functions of rows, by name, each with its rows."""
    x, wide, heads = (torch.randn(1500, *shape, **GPU) for shape in ((1024,), (3072,), (24, 128)))
    table, up = torch.randn(50_001, 1024, **GPU) / 8, torch.randn(3072, 1024, **GPU) / 32
    ids, scale = torch.randint(50_001, (1500,), device="cuda"), torch.tensor(0.7, device="cuda")
    head, one, small = LinearHead(table, len(table), kernels, ALONE), torch.ones(1024, **GPU), torch.ones(128, **GPU)
    cos, sin = compute_rope_cos_and_sin(torch.arange(1500, device="cuda"), 128, 1e6)

    def rotate(h: Tensor, c: Tensor, s: Tensor) -> Tensor:
        q, k = h[:, None, :16], h[:, None, 16:]
        return torch.cat(kernels.qk_norm_rope(q, k, small, small, 1e-6, c[:, None], s[:, None]), 2)[:, 0]

    both, back, chosen = torch.randn(9, 512, 1024, **GPU) / 32, torch.randn(9, 1024, 256, **GPU) / 16, ids[:, None] % 8

    def apply_experts(x: Tensor, first: Tensor) -> Tensor:
        choices = torch.cat([first, first + 1], 1)
        routes = kernels.moe_routes(choices, len(both))
        rows, factors = kernels.moe_permute(x, torch.ones_like(choices) / 3, routes)
        gated = kernels.swiglu_halves(kernels.grouped_gemm(rows, both, routes[2], transposed=True), factors)
        return kernels.moe_unpermute(kernels.grouped_gemm(gated, back, routes[2], transposed=True), routes)

    return {
        "experts": (apply_experts, (x, chosen)),
        "log-sum-exp": (logsumexp_in_fixed_order, ((x[:300] @ table.T).float(),)),
        "logps": (lambda x, t: compute_policy_logps(x[None], head, t[None], t[None] >= 0, None)[0], (x, ids)),
        "scaled logps": (lambda x, t: compute_policy_logps(x[None], head, t[None], t[None] >= 0, scale)[0], (x, ids)),
        "up": (lambda x: kernels.linear(x, up), (x,)),
        "down": (lambda x: kernels.linear(x, up.T.contiguous()), (wide,)),
        "embedding": (lambda ids: kernels.embedding(ids, table), (ids,)),
        "rms_norm": (lambda x: kernels.rms_norm(x, one, 1e-6), (x,)),
        "narrow rms_norm": (lambda x: kernels.rms_norm(x, small, 1e-6), (heads[:, 0],)),
        "add_rms_norm": (lambda x: torch.cat(kernels.add_rms_norm(x, x * 2, one, 1e-6), -1), (x,)),
        "swiglu": (lambda x: kernels.swiglu(x, x * 2), (wide,)),
        "qk_norm_rope": (rotate, (heads, cos, sin)),
    }


def find_wrong_operations() -> list[tuple[str, int, int]]:
    """Return operations and parts for which some rows alone have other bits than among all rows."""
    torch.manual_seed(0)
    kernels, wrong = BatchInvariantKernels(device=ComputeDevice(kind="cuda")), []
    kernels.open()
    for name, (function, tensors) in make_operations(kernels).items():
        whole = function(*tensors)
        for first, count in ((0, 1), (0, 3), (7, 15), (0, 16), (5, 33), (64, 100), (0, 128), (1, 129), (2, 257)):
            part = slice(first, first + count)
            if not function(*(x[part].contiguous() for x in tensors)).equal(whole[part]):
                wrong.append((name, first, count))
    return wrong


def test_rows_have_the_same_bits_in_every_batch() -> None:
    """Rows of each operation do not depend on others, in a process whose first products follow the kernels' `open`."""
    assert run_ranks(find_wrong_operations, 1, timeout=200) == [[]]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_has_the_same_bits_with_a_cache(head_dim: int, window: int | None) -> None:
    """Each token alone after its cache, each prefix, and fewer rows have the whole pass's bits."""
    torch.manual_seed(0)
    options, sinks = AttentionOptions(softcap=None if window is None else 20.0), torch.randn(8, **GPU)
    q, (k, v) = torch.randn(20, 300, 8, head_dim, **GPU), torch.randn(2, 20, 300, 4, head_dim, **GPU)
    whole, wrong = attend_in_blocks_triton(q, k, v, BlockMask(None, window), options, sinks), []
    for end in range(1, 300, 7):
        for first, rows in ((end - 1, slice(20)), (end - 1, slice(4, 5)), (0, slice(3)), (end // 2, slice(2, 9))):
            part = q[rows, first:end], k[rows, :end], v[rows, :end]
            if not attend_in_blocks_triton(*part, BlockMask(None, window), options, sinks).equal(
                whole[rows, first:end]
            ):
                wrong.append((first, end, rows))
    assert not wrong


def test_gradients_are_those_of_the_default_attention(kernels: AutoKernels) -> None:
    """The backward pass of attention in blocks has the bits of the default implementation's."""
    plain, grads = AutoKernels(device=kernels.device), []
    q, k = torch.randn(2, 200, 8, 64, **GPU), torch.randn(2, 200, 4, 64, **GPU)
    for one in (kernels, plain):
        inputs = [x.clone().requires_grad_() for x in (q, k, k)]
        mask = one.attention_mask(torch.zeros(2, 200, dtype=torch.int64, device="cuda"), one_document_per_row=True)
        mixed = one.attention(inputs[0], inputs[1], inputs[2], mask)
        grads.append((mixed, *torch.autograd.grad(mixed, inputs, q)))
    torch.testing.assert_close(grads[0][0], grads[1][0], rtol=2e-2, atol=2e-2)
    assert all(ours.equal(theirs) for ours, theirs in zip(grads[0][1:], grads[1][1:], strict=True))


def test_float32_products_are_refused(kernels: AutoKernels) -> None:
    """cuBLAS's products in float32 depend on the number of rows, so a float32 model is an error with a remedy."""
    with pytest.raises(UserError, match=r'precision\.compute = "bfloat16"'):
        kernels.linear(torch.ones(2, 8, device="cuda"), torch.ones(4, 8, device="cuda"))


@pytest.mark.parametrize("kernels_are_invariant", [True, False])
def test_cuda_graphs_draw_the_same_completions(tmp_path: Path, kernels_are_invariant: bool) -> None:
    """
    Samples of passes over one token, launched as CUDA graphs, have the bits of passes launched kernel by kernel.

    So does the second step, whose weights come from a step without graphs. Training passes launched as graphs have the
    same gradients to bfloat16's rounding (`test_capture.py`), so later weights differ.
    """
    (tmp_path / "tiny.toml").write_text(RECIPE, "utf-8")
    use = "kernels.batch_invariant" if kernels_are_invariant else "kernels.auto"
    words = (
        *(f"kernels.use={use}", f"rollouts.exact={str(kernels_are_invariant).lower()}"),
        *("randomness.deterministic=true", "trainer.steps=2"),
    )
    rows = []
    for capture in ([], ["capture.use=pipeline.captured"]):
        name = f"capture_{len(capture)}"
        outcome = drawloom_run(tmp_path, "tiny.toml", *SIZES, *words, f"run.name={name}", *capture)
        assert outcome.code == 0, outcome.text
        rows.append(series(tmp_path / "runs" / name, *SAMPLED, "sampler_difference", "ratio"))
    assert rows[0] == rows[1]


EXPERTS = "num_experts = 8\nnum_experts_per_tok = 2\nmoe_intermediate_size = 256\n"


@pytest.mark.parametrize(
    "changes", ["", "rollouts.temperature=0.8", "experts", *(word for (word, *_) in LAYOUTS.values())]
)
def test_ratios_are_exactly_1_in_bfloat16(tmp_path: Path, changes: str) -> None:
    """
    GRPO samples 32 rows with a cache, learns from 8 at a time, and its largest difference is 0 at every step.

    A step has a gradient unless all rewards of each group are equal; the first one has unequal rewards. Experts also
    have their balance's gradient.
    """
    recipe = f"{RECIPE}{EXPERTS}".replace("qwen3.dense", "qwen3.moe") if changes == "experts" else RECIPE
    (tmp_path / "tiny.toml").write_text(recipe, "utf-8")
    words, processes = [word for word in [changes] if "=" in word], 2 if "mesh" in changes else 1
    if torch.cuda.device_count() < processes:
        pytest.skip("needs two GPUs")
    outcome = drawloom_run(tmp_path, "tiny.toml", "run.name=tiny", *SIZES, *words, processes=processes)
    assert outcome.code == 0, outcome.text
    measured = series(tmp_path / "runs/tiny", "sampler_difference", "ratio", "clip_fraction")
    assert measured == [(0.0, 1.0, 0.0)] * 3
    norms, equal = zip(*series(tmp_path / "runs/tiny", "grad_norm", "equal_groups"), strict=True)
    assert [norm > 0 for norm in norms] == [changes == "experts" or fraction < 1 for fraction in equal] and norms[0] > 0
