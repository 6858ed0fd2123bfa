"""The gated delta rule in Triton against the eager one in float64, which is tested against a loop over tokens."""

from itertools import cycle, product

import pytest
import torch
from torch import Tensor

from drawloom.kernels.documents import number_recurrent_documents
from drawloom.kernels.gated_delta.eager import delta_rule_eager
from drawloom.kernels.gated_delta.triton import delta_rule_triton
from support.kernels import DEVICE, compare_rules
from support.recurrences import Inputs, create_documents, draw_decays_by_channel, draw_recurrence, replace_tokens

IS_GPU = DEVICE.type == "cuda"

CASES = {
    "one document in each row": ([[70], [70]], (1, 2), (16, 16), False),
    "borders at, before and inside chunks": ([[64, 63, 1, 12]], (1, 1), (9, 7), False),
    "documents of one token, and a state": ([[1, 1, 1, 127]], (1, 2), (66, 20), True),
    "a state of another document": ([[5, 3], [8, 0]], (2, 2), (5, 3), True),
}
"""Lengths of documents by row, heads and widths of keys and values, and whether there is a state."""

WIDE = {
    "keys of 96, values of 192": ([[100, 156], [256]], (2, 2), (96, 192), True),
    "keys and values of 128": ([[100, 1, 199], [300]], (2, 4), (128, 128), False),
    "keys and values of 256": ([[100, 1, 199], [300]], (2, 2), (256, 256), True),
    "long rows": ([[1000, 24, 3072], [4096]], (2, 4), (64, 64), True),
}
"""Cases too long for the interpreter."""

DTYPES = (torch.float32, torch.bfloat16)

BY_CHANNEL = pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])


def inputs_of(
    length: int,
    rows: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    dtype: torch.dtype,
    *,
    by_channel: bool = False,
) -> Inputs:
    drawn = draw_recurrence(length, heads, widths, rows)
    drawn = draw_decays_by_channel(drawn) if by_channel else drawn
    dtypes = dtype, dtype, dtype, torch.float32, dtype
    return Inputs(*(x.to(DEVICE, kind).requires_grad_() for x, kind in zip(drawn, dtypes, strict=True)))


def compare(
    case: tuple[list[list[int]], tuple[int, int], tuple[int, int], bool], dtype: torch.dtype, by_channel: bool
) -> None:
    """Compare results, states and gradients with float64."""
    lengths, heads, widths, has_state = case
    documents, rows = create_documents(lengths, has_state, DEVICE), len(lengths)
    inputs = inputs_of(sum(lengths[0]), rows, heads, widths, dtype, by_channel=by_channel)
    state = torch.randn(rows, heads[1], *widths, device=DEVICE).requires_grad_() if has_state else None
    compare_rules(delta_rule_triton, delta_rule_eager, inputs, documents, state)


@BY_CHANNEL
@pytest.mark.parametrize(("case", "dtype"), [*(product(CASES, DTYPES) if IS_GPU else zip(CASES, cycle(DTYPES)))])
def test_triton_equals_eager(case: str, dtype: torch.dtype, by_channel: bool) -> None:
    """For any borders, widths, head groups and states, results and gradients are as in float64."""
    compare(CASES[case], dtype, by_channel)


@pytest.mark.gpu
@BY_CHANNEL
@pytest.mark.parametrize(("case", "dtype"), [*product(WIDE, DTYPES)])
def test_widths_of_models_equal_eager(case: str, dtype: torch.dtype, by_channel: bool) -> None:
    """Results and gradients at the widths of models, on a GPU, are as in float64."""
    compare(WIDE[case], dtype, by_channel)


@BY_CHANNEL
def test_documents_are_isolated_to_the_bit(by_channel: bool) -> None:
    """Replacing other documents changes no bit of a document, and its loss has zero gradients elsewhere."""
    documents = create_documents([[40, 50, 40]], device=DEVICE)
    ours = documents.ids[0] == 1
    inputs, others = (inputs_of(130, 1, (1, 1), (8, 8), torch.bfloat16, by_channel=by_channel) for _ in range(2))
    replaced = replace_tokens(inputs, others._replace(g=9 * others.g), ours)
    actual, changed = (delta_rule_triton(*x, documents)[0][:, ours] for x in (inputs, replaced))
    assert torch.equal(actual, changed)
    for grad in torch.autograd.grad(actual.float().square().sum(), inputs):
        assert not bool(grad[:, ~ours].any())


@BY_CHANNEL
def test_empty_rows_give_empty_results(by_channel: bool) -> None:
    """Without rows or tokens, results and gradients are empty, and the state passes through."""
    for rows, length in ((0, 4), (2, 0)):
        inputs = inputs_of(length, rows, (1, 2), (4, 3), torch.float32, by_channel=by_channel)
        documents = number_recurrent_documents(torch.zeros(rows, length, dtype=torch.int64, device=DEVICE))
        state = torch.randn(rows, 2, 4, 3, device=DEVICE, requires_grad=True)
        mixed, last = delta_rule_triton(*inputs, documents, state)
        assert mixed.shape == (rows, length, 2, 3) and torch.equal(last, state)
        assert torch.equal(torch.autograd.grad(last.sum(), state)[0], torch.ones_like(state))


def test_wide_keys_and_wide_floats_are_refused() -> None:
    """float64 and keys above 256 get an error with the limit."""
    documents = create_documents([[4]], device=DEVICE)
    inputs = inputs_of(4, 1, (1, 1), (4, 4), torch.float64)
    with pytest.raises(TypeError, match=r"takes float32, bfloat16 or float16, not torch\.float64"):
        delta_rule_triton(*inputs, documents)
    inputs = inputs_of(4, 1, (1, 1), (300, 4), torch.float32)
    with pytest.raises(ValueError, match="keys are 300 wide, and the kernel accepts at most 256"):
        delta_rule_triton(*inputs, documents)


@pytest.mark.gpu
@BY_CHANNEL
@pytest.mark.parametrize("width", [4, 16, 24, 40, 64, 80, 128, 200, 256])
@pytest.mark.parametrize("v_width", [5, 16, 32, 48, 64, 96, 128, 256])
def test_every_pair_of_widths_equals_eager(width: int, v_width: int, by_channel: bool) -> None:
    """In bfloat16, narrow and wide keys with narrow and wide values, across a chunk's border, equal float64."""
    compare(([[70, 60]], (1, 2), (width, v_width), True), torch.bfloat16, by_channel)


@pytest.mark.gpu
@BY_CHANNEL
def test_two_runs_have_the_same_bits(by_channel: bool) -> None:
    """Results and gradients of two runs are bitwise equal."""
    documents = create_documents([[1000, 24, 1024]], device=DEVICE)
    inputs = inputs_of(2048, 1, (2, 4), (128, 128), torch.bfloat16, by_channel=by_channel)
    runs = []
    for _ in range(2):
        mixed, _ = delta_rule_triton(*inputs, documents)
        runs.append([mixed, *torch.autograd.grad(mixed.float().square().sum(), inputs)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_documents_do_not_synchronize_the_host() -> None:
    """Numbering documents and both passes never wait for the device."""
    inputs = inputs_of(300, 2, (1, 2), (64, 64), torch.bfloat16)
    ids = torch.randint(2, (2, 300), device=DEVICE).cumsum(1)
    torch.autograd.grad(delta_rule_triton(*inputs, number_recurrent_documents(ids))[0].sum(), inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(delta_rule_triton(*inputs, number_recurrent_documents(ids))[0].sum(), inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_one_graph_serves_all_packings() -> None:
    """A CUDA graph with both passes, replayed for other documents, has the results of separate launches."""
    inputs = inputs_of(300, 2, (1, 2), (64, 64), torch.bfloat16)
    ids = torch.zeros(2, 300, dtype=torch.int64, device=DEVICE)

    def run() -> list[Tensor]:
        mixed, _ = delta_rule_triton(*inputs, number_recurrent_documents(ids))
        return [mixed, *torch.autograd.grad(mixed.float().square().sum(), inputs)]

    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
        ids.copy_(torch.randint(2, ids.shape, device=DEVICE).cumsum(1))
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(captured, run(), strict=True))
