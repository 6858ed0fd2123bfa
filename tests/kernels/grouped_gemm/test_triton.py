"""Grouped GEMM in Triton against the eager implementation in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.deferral import Deferral
from drawloom.kernels.grouped_gemm import triton as module
from drawloom.kernels.grouped_gemm.eager import grouped_gemm_eager
from drawloom.kernels.grouped_gemm.triton import grouped_gemm_triton
from drawloom.kernels.triton import tma
from support.kernels import DEVICE, assert_all_close, assert_close, draw_tensor, dtypes, exact, few, layouts
from support.seeding import seeds


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(DEVICE, torch.int32)


@few
@given(
    seeds,
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(0, 5),
    st.integers(1, 90),
    st.integers(1, 40),
    dtypes,
    st.tuples(layouts, layouts, layouts),
    st.booleans(),
)
def test_triton_equals_eager(
    _seed: object,
    counts: list[int],
    unused: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    layout: tuple[str, str, str],
    transposed: bool,
) -> None:
    """Any row counts, also 0, sizes and strides agree with float64 in rows and gradients."""
    rows, ends = sum(counts) + unused, ends_of(counts)
    shape = (outputs, inputs) if transposed else (inputs, outputs)
    x = draw_tensor(layout[0], rows, inputs, dtype=dtype)
    weight = draw_tensor(layout[1], len(counts), *shape, dtype=dtype, scale=inputs**-0.5)
    grad = draw_tensor(layout[2], rows, outputs, dtype=dtype).detach()
    with torch.no_grad():
        x[rows - unused :] = torch.nan
        grad[rows - unused :] = torch.nan
    wide, used = exact(x, weight), slice(rows - unused)
    actual = grouped_gemm_triton(x, weight, ends, transposed)
    expected = grouped_gemm_eager(wide[0], wide[1], ends, transposed)
    assert actual.dtype == dtype
    assert_close(actual[used], expected[used], 2)
    result = torch.autograd.grad(actual, (x, weight), grad)
    reference = torch.autograd.grad(expected, wide, grad.double())
    assert_all_close((result[0][used], result[1]), (reference[0][used], reference[1]), 4)


def test_tiles_of_several_experts_are_right() -> None:
    """Experts with more rows than a tile, beside empty and tiny experts, agree with float64."""
    ends = ends_of([300, 0, 1, 129, 0])
    x, weight = draw_tensor("contiguous", 430, 70), draw_tensor("contiguous", 5, 70, 140, scale=0.1)
    wide = exact(x, weight)
    actual, expected = grouped_gemm_triton(x, weight, ends), grouped_gemm_eager(wide[0], wide[1], ends)
    assert_close(actual, expected, 2)
    grads = torch.autograd.grad(actual.square().sum(), (x, weight))
    assert_all_close(grads, torch.autograd.grad(expected.square().sum(), wide), 8)


@few
@given(
    seeds,
    st.lists(st.integers(0, 150), min_size=1, max_size=4),
    st.integers(0, 5),
    st.tuples(st.integers(1, 20), st.integers(1, 40)),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_tma_equals_eager(
    _seed: object, counts: list[int], unused: int, sizes: tuple[int, int], dtype: torch.dtype, transposed: bool
) -> None:
    """With TMA, rows of other experts and unused rows with NaN do not affect results or gradients."""
    inputs, outputs = (8 * size for size in sizes)
    rows, ends = sum(counts) + unused, ends_of(counts)
    shape = (outputs, inputs) if transposed else (inputs, outputs)
    x = draw_tensor("contiguous", rows, inputs, dtype=dtype)
    weight = draw_tensor("contiguous", len(counts), *shape, dtype=dtype, scale=inputs**-0.5)
    grad = draw_tensor("contiguous", rows, outputs, dtype=dtype).detach()
    with torch.no_grad():
        x[rows - unused :] = torch.nan
        grad[rows - unused :] = torch.nan
    wide, used = exact(x, weight), slice(rows - unused)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tma, "is_supported", lambda device: True)
        patch.setattr(module, "MIN_ROWS_PER_EXPERT", 0)
        actual = grouped_gemm_triton(x, weight, ends, transposed)
        result = torch.autograd.grad(actual, (x, weight), grad)
    expected = grouped_gemm_eager(wide[0], wide[1], ends, transposed)
    assert_close(actual[used], expected[used], 2)
    reference = torch.autograd.grad(expected, wide, grad.double())
    assert_all_close((result[0][used], result[1]), (reference[0][used], reference[1]), 4)


def test_tma_is_used_only_for_aligned_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA needs half precision, rows at multiples of 16 bytes, transposed or not, and enough rows per expert."""
    monkeypatch.setattr(tma, "is_supported", lambda device: True)
    rows, weight = torch.zeros(256, 16, dtype=torch.bfloat16), torch.zeros(4, 16, 24, dtype=torch.bfloat16)
    is_faster_by_tma = module.is_faster_by_tma
    assert is_faster_by_tma(4, rows, weight) and is_faster_by_tma(4, rows, weight.transpose(1, 2))
    assert not is_faster_by_tma(5, rows, weight)
    assert not is_faster_by_tma(4, rows.float(), weight.float())
    assert not is_faster_by_tma(4, rows[:, :12].contiguous(), weight) and not is_faster_by_tma(4, rows[:, 1:9], weight)
    assert not is_faster_by_tma(4, rows.T.contiguous().T, weight) and not is_faster_by_tma(
        4, rows, weight[:1].expand(4, 16, 24)
    )


def test_weight_gradient_can_be_deferred() -> None:
    """A deferred gradient of the matrices is bitwise equal to an immediate one."""
    ends = ends_of([3, 0, 5])
    x, weight = draw_tensor("contiguous", 8, 16), draw_tensor("contiguous", 3, 16, 20)
    expected = torch.autograd.grad(grouped_gemm_triton(x, weight, ends).sum(), (x, weight))
    deferral = Deferral()
    with deferral:
        result = grouped_gemm_triton(x, weight, ends)
    with deferral.defer():
        actual = torch.autograd.grad(result.sum(), (x, weight), allow_unused=True)
    assert actual[1] is None
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(deferral.take_queued_gradients()[0].drain_and_return_remaining_grad(), expected[1])


def test_more_rows_than_32_bits_number_are_refused() -> None:
    """Rows whose indices do not fit into 32 bits are refused before any row is read."""
    x, weight = torch.ones(1, 1, device=DEVICE).expand(2**31, 1), torch.ones(1, 1, 1, device=DEVICE)
    with pytest.raises(ValueError, match="2147483648 rows are more than 32-bit row indices"):
        grouped_gemm_triton(x, weight, ends_of([1]))


def test_operators_pass_opcheck() -> None:
    """Both products pass torch.library.opcheck, which torch.compile relies on."""
    x, weight = torch.randn(8, 16, device=DEVICE), torch.randn(3, 16, 20, device=DEVICE)
    torch.library.opcheck(torch.ops.drawloom.grouped_gemm_rows.default, (x, weight, ends_of([3, 0, 5])))
    torch.library.opcheck(torch.ops.drawloom.grouped_gemm_matrices.default, (x, x + 1, ends_of([3, 0, 5])))


class Launched:
    """Kernel for recording the precision of launches instead of computing."""

    def __init__(self) -> None:
        self.precisions: list[str] = []

    def __getitem__(self, _: object) -> Any:
        return lambda *_, **settings: self.precisions.append(settings["PRECISION"])


def test_float32_is_multiplied_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels use TF32 if torch does, and otherwise float32."""
    launches = Launched()
    for name in ("_multiply_rows_kernel", "_outer_products_kernel"):
        monkeypatch.setattr(module, name, launches)
    x, weight, ends = torch.ones(4, 16, device=DEVICE), torch.ones(2, 16, 8, device=DEVICE), ends_of([2, 2])
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        try:
            module._multiply_rows_by_expert(x, weight, ends)
            module._sum_outer_products_by_expert(x, x, ends)
        finally:
            torch.set_float32_matmul_precision("highest")
    assert launches.precisions == ["ieee", "ieee", "tf32", "tf32"]
