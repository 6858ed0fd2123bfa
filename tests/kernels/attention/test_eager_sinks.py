"""Sinks by corrected kernel statistics, against attention over all scores."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.attention.eager import attention_eager, create_causal_mask
from drawloom.kernels.attention.flash import SoftmaxStatistics, attend_with_optional_sinks
from drawloom.kernels.attention.options import AttentionOptions

aten = torch.ops.aten


class CpuFlash:
    """torch's flash attention for CPUs, which computes in float64."""

    def __init__(self, scale: float | None) -> None:
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, SoftmaxStatistics]:
        swapped = (x.transpose(1, 2) for x in (q, k, v))
        mixed, lse = aten._scaled_dot_product_flash_attention_for_cpu(*swapped, 0.0, True, scale=self.scale)
        return mixed.transpose(1, 2), SoftmaxStatistics(lse.transpose(1, 2), (q.new_empty(0), q.new_empty(0)))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, statistics: SoftmaxStatistics
    ) -> tuple[Tensor, Tensor, Tensor]:
        swapped = (x.transpose(1, 2) for x in (grad, q, k, v, mixed, statistics.lse))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*swapped, 0.0, True, scale=self.scale)
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
        return grad_q, grad_k, grad_v


@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_given_statistics_make_gradients_exact(has_sinks: bool, scale: float | None) -> None:
    """A kernel without sinks, given the new result and statistics, has all gradients of attention with sinks."""
    q, k, v = (torch.randn(2, 11, 3, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    sinks = torch.tensor([-3.0, 0.5, 20.0], dtype=torch.float64, requires_grad=True) if has_sinks else None
    actual = attend_with_optional_sinks(CpuFlash(scale), q, k, v, sinks)
    mask = create_causal_mask(11, 11, None, q.device)
    expected = attention_eager(q, k, v, mask, AttentionOptions(scale), sinks)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    seed = torch.randn_like(actual)
    grads = (torch.autograd.grad(output, inputs, seed) for output in (actual, expected))
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


def test_frozen_sinks_get_no_gradient() -> None:
    """Queries get a gradient if sinks do not require one."""
    q = torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True)
    mixed = attend_with_optional_sinks(CpuFlash(None), q, q, q, torch.zeros(2, dtype=torch.float64))
    assert bool(torch.autograd.grad(mixed.sum(), q)[0].abs().sum() > 0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does
def test_attention_with_statistics_compiles_without_breaks() -> None:
    """Traced as one graph, forward and backward, attention with sinks has the results of eager mode."""
    q = torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    sinks = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def attend(q: Tensor, sinks: Tensor) -> Tensor:
        return attend_with_optional_sinks(CpuFlash(0.3), q, q * 2, q * 3, sinks)

    runs = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        mixed = function(q, sinks)
        runs.append([mixed, *torch.autograd.grad(mixed.square().sum(), (q, sinks))])
    torch.testing.assert_close(*runs)
