"""Passes captured as CUDA graphs compute the same as passes launched kernel by kernel."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.overlap.shard_copies import CopiedShards
from drawloom.components.pipeline.captured import CapturedPasses
from support import pipelines
from support.gpu import drawloom_run
from support.processes import run_ranks
from support.runs import series, write_corpus

pytestmark = pytest.mark.gpu

CASES: list[pipelines.Case] = [
    ("one_f_one_b", 4, True, False, "smoothed"),
    ("gpipe", 3, False, True, "plain"),
    ("zero_bubble_1p", 4, True, False, "dft"),
    ("zero_bubble_v", 3, False, False, "states"),
    ("dual_pipe_v", 4, False, False, "plain"),
]


def choose_cases(how: dict[str, Any]) -> list[pipelines.Case]:
    """Return the cases of a mesh; context ranks return no hidden states, since each has a part of a row."""
    return [case for case in CASES if case[-1] != "states" or "context" not in how.get("sizes", {})]


def steps(ranks: int, capture: bool, **how: Any) -> list[list[dict[str, Any]]]:
    """Return the last of four steps on all ranks, by case."""
    how = {"kind": "cuda", "dtypes": pipelines.FLOAT64, "step_count": 4, "layers": 4, "lengths": (6, 0), **how}
    cases = choose_cases(how)
    features = [*how.pop("features", ()), CapturedPasses] if capture else []
    return run_ranks(_steps, ranks, cases, {**how, "features": features}, timeout=240)


def _steps(cases: list[pipelines.Case], how: dict[str, Any]) -> list[dict[str, Any]]:
    return pipelines.steps(cases, **how)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (1, {}),
        (1, {"recompute": ["selective", "quantized"]}),
        (2, {}),
        (2, {"recompute": ["blocks"]}),
        (2, {"sizes": {"data_replicate": 2}}),
        (2, {"sizes": {"data_shard": 2}}),
        (2, {"sizes": {"context": 2}}),
        (2, {"sizes": {"tensor": 2}}),
        (2, {"sizes": {"data_shard": 2}, "settings": {"reshard_after_forward": False}}),
        (2, {"sizes": {"data_shard": 2}, "features": [CopiedShards]}),
    ],
    ids=str,
)
def test_cuda_graphs_have_the_same_gradients(ranks: int, how: dict[str, Any]) -> None:
    """CUDA graphs have the same float64 gradients after three updates, for all kinds of schedules and features."""
    chosen = choose_cases(how)
    cases = [(policy, case) for policy in how.get("recompute", ["none"]) for case in chosen]
    for graphs, plain in zip(steps(ranks, True, **how), steps(ranks, False, **how), strict=True):
        for case, graph, other in zip(cases, graphs, plain, strict=True):
            assert graph["loss"] == pytest.approx(other["loss"], rel=1e-10), case
            assert graph["held_out"] == pytest.approx(other["held_out"], rel=1e-10), case
            for kind in ("grads", "weights"):
                for name, tensor in graph[kind].items():
                    torch.testing.assert_close(tensor, other[kind][name], rtol=1e-9, atol=1e-12)


COMMON = ("tiny.toml", "batch.micro_size=2", "trainer.steps=8", "randomness.deterministic=true")
KERNELS = (
    *("model.hidden_size=64", "model.head_dim=32", "model.num_attention_heads=4", "model.num_key_value_heads=2"),
    *("model.intermediate_size=128", "precision.compute=bfloat16", "vars.length=128"),
)
EXPERTS = (
    *("model.use=model.qwen3.moe", "model.num_hidden_layers=2"),
    *("model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=64"),
)


EXPERTS_OF_TWO = (
    *(*EXPERTS, "mesh.data_shard=2", "mesh.expert=2", "device.share=true"),
    *("dispatcher.use=experts.symmetric", "dispatcher.capacity=2.0"),
)


HYBRID = (
    *("model.use=model.qwen3_5", "model.num_hidden_layers=4", "model.partial_rotary_factor=0.5"),
    *("model.linear_key_head_dim=32", "model.linear_value_head_dim=32", "model.linear_num_key_heads=2"),
    "model.linear_num_value_heads=4",
)


@pytest.mark.parametrize(
    "words",
    [
        (),
        EXPERTS,
        EXPERTS_OF_TWO,
        HYBRID,
        ("stages.recompute=selective",),
        ("schedule.use=pipeline.schedules.zero_bubble_1p",),
        ("compile.use=stages.compiled",),
    ],
    ids=["dense", "experts", "experts of two ranks", "hybrid", "recompute", "split", "compiled"],
)
def test_run_with_cuda_graphs_has_the_same_losses(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Eight steps in mixed precision have the same losses and norms to bfloat16's rounding."""
    write_corpus(tmp_path)
    for name in ("graphs", "kernels"):
        capture = ["capture.use=pipeline.captured"] * (name == "graphs")
        processes = 2 if words == EXPERTS_OF_TWO else 1
        outcome = drawloom_run(tmp_path, *COMMON, *KERNELS, *words, f"run.name={name}", *capture, processes=processes)
        assert outcome.code == 0, outcome.text
        # torch's compiler prints its own warnings.
        assert "compile.use=stages.compiled" in words or "arning" not in outcome.text, outcome.text
    ours, theirs = (series(tmp_path / "runs" / name, "loss", "grad_norm") for name in ("graphs", "kernels"))
    assert len(ours) == 8
    for mine, other in zip(ours, theirs, strict=True):
        assert list(mine) == pytest.approx(list(other), rel=2e-3)
