"""Properties of all Triton kernels, such as compilation as one graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.kernels.cross_entropy.options import LogitCut
from drawloom.kernels.cross_entropy.triton import cut_cross_entropy_triton, linear_cross_entropy_triton
from drawloom.kernels.documents import RecurrentDocuments
from drawloom.kernels.gated_delta.triton import causal_conv_triton, delta_rule_triton
from drawloom.kernels.gates.triton import geglu_triton, oss_swiglu_halves_triton, swiglu_halves_triton, swiglu_triton
from drawloom.kernels.grouped_gemm.triton import grouped_gemm_triton
from drawloom.kernels.moe.eager import moe_routes_eager
from drawloom.kernels.moe.triton import moe_permute_triton, moe_routes_triton, moe_unpermute_triton
from drawloom.kernels.rms_norm.triton import add_rms_norm_triton, rms_norm_triton
from drawloom.kernels.rope.frequencies import compute_rope_cos_and_sin
from drawloom.kernels.rope.triton import qk_norm_rope_triton, rope_triton
from drawloom.kernels.triton.primitives import next_power_of_2, unify_angle_strides, view_as_rows
from support.kernels import DEVICE, draw_tensor, spread_apart

TARGETS = torch.tensor([0, 3, -100, 5]).to(DEVICE)
IDS = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32).to(DEVICE)
EXPERTS_OF = torch.tensor([[0, 2], [1, -1], [2, 1], [0, 1]]).to(DEVICE)


def norms(x: Tensor, weight: Tensor) -> Tensor:
    normed, summed = add_rms_norm_triton(rms_norm_triton(x, weight, 1e-6), x, weight, 1e-6)
    return swiglu_triton(normed, summed)


def halves(x: Tensor, weight: Tensor) -> Tensor:
    return swiglu_halves_triton(x * weight, x.sum(-1))


def rotations(x: Tensor, weight: Tensor) -> Tensor:
    heads = x.view(1, 4, 2, 8)
    cos, sin = torch.cos(x[None, :, :4]).detach(), torch.sin(x[None, :, :4]).detach()
    q, k = qk_norm_rope_triton(heads, heads[:, :, :1], weight[:8], weight[8:], 1e-6, cos, sin)
    return rope_triton(q * k, cos, sin)


def losses(x: Tensor, weight: Tensor) -> Tensor:
    matrix = weight * x[:1] + torch.arange(8, device=x.device)[:, None] * weight
    cut = cut_cross_entropy_triton(x, matrix, TARGETS)
    return sum((*cut, *linear_cross_entropy_triton(x, matrix, TARGETS)))  # type: ignore[return-value]


def experts(x: Tensor, weight: Tensor) -> Tensor:
    routes = moe_routes_triton(EXPERTS_OF, 3)
    probabilities = (x[:, :2] * weight[:2]).softmax(-1)
    rows, row_scalars = moe_permute_triton(x, probabilities, routes)
    used = (torch.arange(len(rows), device=x.device) < routes.offsets[-1])[:, None]
    product = grouped_gemm_triton(rows, weight.expand(3, 5, 16), routes.offsets, transposed=True)
    outputs = product.where(used, 0) * row_scalars[:, None]
    return moe_unpermute_triton(outputs, routes, probabilities)


def recurrences(x: Tensor, weight: Tensor) -> Tensor:
    documents = RecurrentDocuments(IDS, torch.zeros_like(IDS[:, 0]))
    convolved = causal_conv_triton(x[None], weight[:, None], documents.ids)
    q, k, v, state = (part.reshape(1, 4, 1, 4) for part in torch.split(convolved, 4, -1))
    gates = -x[None, :, :1].exp(), x[None, :, 1:2]
    mixed, last = delta_rule_triton(q, k, v, *gates, documents, state.transpose(1, 2))
    return mixed.flatten(2) + last[0]


@pytest.mark.parametrize("compute", [norms, halves, rotations, losses, experts, recurrences])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does
def test_kernels_compile_without_breaks(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    """An operation that is traced as one graph, forward and backward, gives the bits of eager mode."""
    x, weight = draw_tensor("contiguous", 4, 16), draw_tensor("contiguous", 16)
    compiled: Any = torch.compile(compute, fullgraph=True, backend="aot_eager")
    runs = []
    for function in (compute, compiled):
        result = function(x, weight)
        runs.append((result, *torch.autograd.grad(result.square().sum(), (x, weight))))
    assert all(torch.equal(result, reference) for result, reference in zip(*runs, strict=True))


ROUTES = moe_routes_eager(EXPERTS_OF, 3)
ANGLES = compute_rope_cos_and_sin(torch.arange(4, device=DEVICE)[None], 16, 1e4)
CUT = LogitCut(filter_eps=1e-6, tile=(16, 16))


def multiply_groups(x: Tensor, weight: Tensor) -> Tensor:
    return grouped_gemm_triton(x, weight, torch.tensor([1, 4]).to(DEVICE, torch.int32))


STRIDED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x: rms_norm_triton(x, x[0].detach(), 1e-6), [(4, 16)]),
    "add_rms_norm": (lambda x, y: add_rms_norm_triton(x, y, x[0].detach(), 1e-6), [(4, 16), (4, 16)]),
    "swiglu": (swiglu_triton, [(4, 16), (4, 16)]),
    "swiglu_halves": (lambda x: swiglu_halves_triton(x, x[:, 0].detach()), [(4, 16)]),
    "geglu": (geglu_triton, [(4, 16), (4, 16)]),
    "oss_swiglu_halves": (lambda x: oss_swiglu_halves_triton(x, x[:, 0].detach(), 1.7, 2.0), [(4, 16)]),
    "rope": (lambda x: rope_triton(x, *ANGLES), [(1, 4, 3, 16)]),
    "qk_norm_rope": (
        lambda q, k: qk_norm_rope_triton(q, k, q[0, 0, 0].detach(), k[0, 0, 0].detach(), 1e-6, *ANGLES),
        [(1, 4, 3, 16), (1, 4, 2, 16)],
    ),
    "linear_cross_entropy": (lambda x, w: linear_cross_entropy_triton(x, w, TARGETS), [(4, 16), (8, 16)]),
    "cut_cross_entropy": (lambda x, w: cut_cross_entropy_triton(x, w, TARGETS), [(4, 16), (8, 16)]),
    "cut_cross_entropy, filtered": (lambda x, w: cut_cross_entropy_triton(x, w, TARGETS, CUT), [(4, 16), (8, 16)]),
    "moe_permute": (lambda x, p: moe_permute_triton(x, p, ROUTES), [(4, 16), (4, 2)]),
    "moe_unpermute": (lambda x, p: moe_unpermute_triton(x, ROUTES, p), [(8, 16), (4, 2)]),
    "grouped_gemm": (multiply_groups, [(4, 16), (2, 16, 3)]),
}
"""Every kernel that takes strides: a function of a few tensors, and their shapes."""

DIMENSIONS = [(name, d) for name, (_, shapes) in STRIDED.items() for d in range(max(map(len, shapes)))]


@pytest.mark.xdist_group("far apart")
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize(("name", "dimension"), DIMENSIONS)
def test_strides_may_exceed_32_bits(name: str, dimension: int) -> None:
    """Inputs and incoming gradients whose elements are 2^31 apart, along any dimension, give the same results."""
    compute, shapes = STRIDED[name]
    inputs = [draw_tensor("contiguous", *shape, dtype=torch.bfloat16) for shape in shapes]
    apart = [spread_apart(x, dimension) if dimension < x.ndim else x for x in inputs]
    runs = []
    for given in (inputs, apart):
        actual = compute(*given)
        results = list(actual) if isinstance(actual, tuple) else [actual]
        gradients = [torch.full_like(result, 0.5) for result in results]
        if given is apart:
            gradients = [spread_apart(g, dimension) if dimension < g.ndim else g for g in gradients]
        runs.append((*results, *torch.autograd.grad(results, given, gradients)))
    torch.testing.assert_close(*runs)  # a GPU reads them in other layouts, and sums in another order


def test_rows_are_views_where_strides_allow() -> None:
    """Rows are views if strides allow it, and always have a last stride of 1."""
    x = torch.arange(24.0).view(2, 3, 4)
    assert view_as_rows(x).data_ptr() == x.data_ptr()
    assert view_as_rows(x[..., :2]).data_ptr() == x.data_ptr()
    for strided in (x.transpose(0, 1), x.transpose(1, 2), x[..., ::2]):
        rows = view_as_rows(strided)
        assert rows.stride(1) == 1
        assert torch.equal(rows, strided.reshape(-1, strided.shape[-1]))


def test_angle_tables_get_equal_strides() -> None:
    """cos and sin get equal strides, and tensors with equal strides are not copied."""
    cos, sin = torch.rand(1, 3, 4).expand(2, 3, 4), torch.rand(2, 3, 4)
    assert unify_angle_strides(sin, sin + 1)[0] is sin
    actual = unify_angle_strides(cos, sin)
    assert actual[0].stride() == actual[1].stride()
    assert torch.equal(actual[0], cos)


def test_next_power_of_2_is_the_least_one() -> None:
    """next_power_of_2 returns the least power of two not below the number."""
    assert [next_power_of_2(number) for number in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 4, 8, 1024]
