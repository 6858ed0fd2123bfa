"""Results of attention that recomputed blocks keep, against recomputed ones."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import drawloom
from drawloom.components.pipeline.kept_attention import ATTENTION, _forward_keeping_attention
from drawloom.graph.cli.main import main
from drawloom.kernels.attention.cudnn import ONE_DOCUMENT_PER_ROW, attention_cudnn
from drawloom.kernels.recompute.repeated_calls import call_with_recomputation
from support.observers_of_runs import TINY
from support.pipelines import batches
from support.steps import train

LAYERS, MICROBATCHES = 3, 3
KEPT = {"kept": {"use": "pipeline.kept_attention"}}


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count calls of attention."""

    calls = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += operator.name() in ATTENTION
        return operator(*args, **(kwargs or {}))


def gradients(folder: Path, schedule: str, recompute: str | int, **more: Any) -> tuple[dict[str, Tensor], int]:
    """Return the gradients of two steps, and how often attention was computed."""
    values = {
        "device": {"kind": "cpu"},
        "model": TINY | {"num_hidden_layers": LAYERS},
        "run": {"name": "small", "folder": str(folder / "run")},
        "schedule": {"use": f"pipeline.schedules.{schedule}"},
        "stages": {"recompute": recompute},
    }
    with (
        drawloom.Recipe.load("first_run").with_values(values | more).open(only="executor") as objects,
        Counter() as counter,  # type: ignore[no-untyped-call]
    ):
        executor = objects["executor"]
        for _ in range(2):
            train(executor, batches(MICROBATCHES))
        return {name: weight.grad.clone() for name, weight in executor.stages.named_parameters()}, counter.calls


@pytest.mark.parametrize("more", [{}, {"offload": {"use": "pipeline.offloaded_inputs"}}], ids=["kept", "offloaded"])
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble_v"])
def test_attention_is_computed_once(schedule: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Gradients have the same bits, and attention runs once for each microbatch and block instead of twice."""
    once = 2 * MICROBATCHES * LAYERS
    plain, count = gradients(tmp_path, schedule, "blocks")
    assert count == 2 * once
    kept, count = gradients(tmp_path, schedule, "blocks", **KEPT, **more)
    assert count == once
    assert all(torch.equal(kept[name], plain[name]) for name in plain)


def test_some_blocks_keep_their_attention(tmp_path: Path) -> None:
    """With every other block recomputed, all attention runs once."""
    plain, _ = gradients(tmp_path, "gpipe", "none")
    kept, count = gradients(tmp_path, "gpipe", 2, **KEPT)
    assert count == 2 * MICROBATCHES * LAYERS
    assert all(torch.equal(kept[name], plain[name]) for name in plain)


def test_plans_count_results_and_the_time_saved(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan has each block's result and log-sum-exps in memory, and a shorter step."""

    def plan(*words: str) -> tuple[int, float]:
        edits = ("stages.recompute=blocks", "packing.length=4096", "batch.micro_size=1", *words)
        main(["plan", "first_run", *edits, "--device", "h100", "--format", "json"])
        planned = json.loads(capsys.readouterr().out)
        sizes = planned["memory"][0]["activations"]
        return sum(size for label, size in sizes.items() if label != "temporary"), planned["step_seconds"]

    plain, kept = plan(), plan("kept.use=pipeline.kept_attention")
    assert kept[0] - plain[0] == 4 * 4096 * (192 + 6) * 4
    assert kept[1] < plain[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_attention_of_cudnn_is_computed_once() -> None:
    """In a recomputed function on a GPU, cuDNN's attention runs once, and gradients have the same bits."""

    def compute_gradient(attend: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        x = torch.randn(2, 256, 4, 64, generator=torch.Generator().manual_seed(0)).cuda().bfloat16().requires_grad_()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            call_with_recomputation(attend, x).square().sum().backward()
        assert x.grad is not None
        names = [event.name for event in profile.events() or ()]
        return x.grad, sum("fprop" in name for name in names)  # cuDNN's forward pass

    def attend(x: Tensor) -> Tensor:
        return attention_cudnn(x * 2, x * 3, x * 4, ONE_DOCUMENT_PER_ROW) * 5

    plain, calls = compute_gradient(attend)
    assert calls == 2
    kept, calls = compute_gradient(partial(_forward_keeping_attention, attend))
    assert calls == 1
    assert torch.equal(kept, plain)


def test_check_asks_for_recomputed_blocks() -> None:
    """Without recomputed blocks the table would do nothing."""
    with pytest.raises(drawloom.RecipeError, match=r'write recompute = "blocks" in .stages.'):
        drawloom.Recipe.load("first_run", "kept.use=pipeline.kept_attention").check()
