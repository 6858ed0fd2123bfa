"""The table of attention implementations in docs/kernels.md, against the code."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.kernels.attention.cudnn import CUDNN, ONE_DOCUMENT_PER_ROW, choose_one_document_implementation
from drawloom.kernels.attention.eager import Attend, attention_eager, create_causal_document_mask
from drawloom.kernels.attention.flash import attention_flash, compute_document_offsets, why_not_flash
from drawloom.kernels.attention.flex import FLEX, create_document_block_mask
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions

PAGE = Path(__file__).parents[3] / "docs" / "kernels.md"

CASES: dict[str, tuple[int, int, AttentionOptions, bool]] = {
    "one width, up to 128": (64, 64, PLAIN_ATTENTION, False),
    "a scale": (64, 64, AttentionOptions(0.3), False),
    "width 256": (256, 256, PLAIN_ATTENTION, False),
    "keys of 192, values of 128": (192, 128, PLAIN_ATTENTION, False),
    "sinks": (64, 64, PLAIN_ATTENTION, True),
    "sinks, width 256": (256, 256, PLAIN_ATTENTION, True),
    "a softcap": (64, 64, AttentionOptions(softcap=20.0), False),
}
"""Width of queries and keys, width of values, options, and whether there are sinks, by the first column."""


def read_table() -> dict[str, tuple[str, str, str]]:
    """Return the table's cells by first column: rows with one document, packed rows, and `varlen`."""
    text = PAGE.read_text("utf-8").partition("| attention with |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {name: (whole, packed, varlen) for name, whole, packed, varlen in rows}


def inputs(case: str, device: torch.device | str, length: int = 300) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k, v in bfloat16 and sinks or None, with equally many heads if widths differ."""
    width, v_width, _, has_sinks = CASES[case]
    heads, kv_heads = (4, 2) if width == v_width else (4, 4)
    drawn = (
        torch.randn(2, length, count, dim, device=device).bfloat16().requires_grad_()
        for count, dim in ((heads, width), (kv_heads, width), (kv_heads, v_width))
    )
    q, k, v = drawn
    return q, k, v, torch.randn(heads, device=device, requires_grad=True) if has_sinks else None


class GpuTensor:
    """The shape (2, 300, heads, width) of a tensor on a GPU that this machine may not have."""

    is_cuda = True

    def __init__(self, heads: int, width: int) -> None:
        self.shape = torch.Size((2, 300, heads, width))

    def transpose(self, *_: int) -> "GpuTensor":
        return self


def test_the_table_has_all_cases() -> None:
    """The table has one line per case, in the same order."""
    assert list(read_table()) == list(CASES)


@pytest.mark.parametrize("case", CASES)
def test_rows_of_one_document_go_where_the_table_says(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with cuDNN up to width 128 and for 192/128, and without cuDNN, the server is the documented one."""
    first, _, then = read_table()[case][0].partition(", else ")
    module, (width, v_width, options, has_sinks) = "drawloom.kernels.attention.cudnn", CASES[case]
    q, k, v = GpuTensor(4, width), GpuTensor(2, width), GpuTensor(2, v_width)
    monkeypatch.setattr(f"{module}.SDPAParams", lambda *tensors: None)
    monkeypatch.setattr(f"{module}.can_use_flash_attention", lambda params: True)
    for has_cudnn in (True, False):
        uses_cudnn = has_cudnn and width <= 192
        monkeypatch.setattr(f"{module}.can_use_cudnn_attention", lambda params, used=uses_cudnn: used)
        server = choose_one_document_implementation(q, k, v, options, torch.zeros(4) if has_sinks else None)  # type: ignore[arg-type]
        names = {"cudnn": "cuDNN", "torch": "torch's own choice"}
        assert names.get(server, server) == (first if uses_cudnn else then or first)


@pytest.mark.parametrize("case", CASES)
def test_varlen_refuses_the_cases_of_the_table(case: str) -> None:
    """`varlen` refuses exactly the cases whose cell is empty, and names the reason."""
    q, k, v, sinks = inputs(case, "meta")
    options = CASES[case][2]
    refuses = read_table()[case][2] == "–"
    assert bool(why_not_flash(q, v, options)) == refuses
    if refuses:
        with pytest.raises(ValueError, match="it has no softcap; choose the implementation 'flex'"):
            attention_flash(q, k, v, None, options, sinks)


def test_heads_above_256_are_refused_by_varlen() -> None:
    """Heads that flash attention does not support give their width and the limit."""
    q = torch.empty(1, 4, 2, 320, device="meta")
    with pytest.raises(ValueError, match="heads are 320 wide, and it accepts at most 256"):
        attention_flash(q, q, q, None)


def test_packed_rows_go_to_flex() -> None:
    """Packed rows use flex_attention in every case, also with `cudnn`."""
    assert {packed for _, packed, _ in read_table().values()} == {"flex"}
    assert CUDNN.mask is FLEX.mask


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_servers_equal_attention_over_all_scores(case: str, deterministic: bool) -> None:
    """On a GPU every cell in the table has the result and gradients of float32 scores, deterministic or not."""
    q, k, v, sinks = inputs(case, "cuda")
    options, learned = CASES[case][2], [x for x in (q, k, v, sinks) if x is not None]
    whole = torch.zeros(2, 300, dtype=torch.int64, device="cuda")
    packed = (torch.rand(2, 300, device="cuda") < 0.02).cumsum(1)
    seed = torch.randn(*q.shape[:3], v.shape[3], device="cuda").bfloat16()
    runs: list[tuple[Attend, Any, Tensor]] = [
        (CUDNN.attend, ONE_DOCUMENT_PER_ROW, whole),
        (FLEX.attend, create_document_block_mask(packed, 40), packed),
    ]
    if read_table()[case][2] != "–":
        runs += [(attention_flash, None, whole), (attention_flash, compute_document_offsets(packed, 40), packed)]
    torch.use_deterministic_algorithms(deterministic, warn_only=False)
    try:
        results = []
        for attend, mask, _ in runs:
            mixed = attend(q, k, v, mask, options, sinks)
            results.append((mixed, torch.autograd.grad(mixed, learned, seed)))
    finally:
        torch.use_deterministic_algorithms(False)
    for (mixed, grads), (_, _, documents) in zip(results, runs, strict=True):
        wide = [x.detach().float().requires_grad_() for x in learned]
        mask = create_causal_document_mask(documents, None if documents is whole else 40)
        exact = attention_eager(wide[0], wide[1], wide[2], mask, options, wide[3] if sinks is not None else None)
        torch.testing.assert_close(mixed.float(), exact, atol=0.03, rtol=0.03)
        for grad, expected in zip(grads, torch.autograd.grad(exact, wide, seed.float()), strict=True):
            error = (grad.float() - expected).norm() / expected.norm()
            assert float(error) < 0.02


def test_page_mentions_every_server() -> None:
    """The page explains every name in the table."""
    text = PAGE.read_text("utf-8")
    assert all(re.search(rf"`{name}`", text) for name in ("cudnn", "flex", "varlen", "eager"))
