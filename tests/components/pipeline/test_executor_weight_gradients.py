"""Weight gradients added in products' epilogues, as on a GPU, beside gradients added by autograd."""

from typing import Any

import pytest
import torch

from drawloom.kernels import deferred_grads
from support import pipelines

CASES: list[pipelines.Case] = [
    ("one_f_one_b", 3, True, False, "plain"),
    ("zero_bubble_1p", 3, True, False, "smoothed"),
    ("zero_bubble_v", 2, False, True, "plain"),
]


def run_fused_steps(monkeypatch: pytest.MonkeyPatch, dtypes: Any) -> tuple[list[dict[str, Any]], int]:
    """Run a step per case with fused products; return the results and the number of fused additions."""
    calls: list[bool] = []
    add = deferred_grads.add_to_grad

    def count_and_add(weight: torch.Tensor, *given: Any) -> torch.Tensor | None:
        part = add(weight, *given)
        calls.append(part is None)
        return part

    with monkeypatch.context() as patch:
        patch.setattr(deferred_grads, "FUSED", {"cpu"})
        patch.setattr(deferred_grads, "add_to_grad", count_and_add)
        return pipelines.steps(CASES, dtypes=dtypes), sum(calls)


def test_fused_products_give_the_gradients_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """For plain and split backward passes, tied and frozen weights; only a first product has nothing to be added to."""
    fused_steps, count = run_fused_steps(monkeypatch, pipelines.FLOAT64)
    assert count > 100
    for ours, theirs in zip(fused_steps, pipelines.steps(CASES), strict=True):
        assert ours["loss"] == theirs["loss"]
        assert ours["grads"].keys() == theirs["grads"].keys()
        for name, grad in theirs["grads"].items():
            torch.testing.assert_close(ours["grads"][name], grad, rtol=1e-12, atol=1e-14)


def test_fused_products_of_bfloat16_are_nearer_to_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products summed without rounding to bfloat16 differ by this rounding, and no more."""
    fused_steps, _ = run_fused_steps(monkeypatch, pipelines.MIXED)
    for ours, theirs in zip(fused_steps, pipelines.steps(CASES, dtypes=pipelines.MIXED), strict=True):
        for name, grad in theirs["grads"].items():
            assert ours["grads"][name].dtype == torch.float32
            scale = grad.norm().item()
            assert (ours["grads"][name] - grad).norm().item() < 2**-8 * scale + 1e-7, name
