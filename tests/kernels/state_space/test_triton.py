"""Mamba-2's recurrence in Triton against the eager one in float64, which is tested against a loop over tokens."""

from itertools import cycle, product

import pytest
import torch
from torch import Tensor

from drawloom.kernels.documents import number_recurrent_documents
from drawloom.kernels.state_space.eager import state_space_eager
from drawloom.kernels.state_space.triton import state_space_triton
from support.kernels import DEVICE, compare_rules
from support.recurrences import create_documents, draw_recurrence, replace_tokens

IS_GPU = DEVICE.type == "cuda"

CASES = {
    "one document in each row": ([[70], [70]], (1, 2), (16, 16), False),
    "borders at, before and inside chunks": ([[64, 63, 1, 12]], (1, 1), (9, 7), False),
    "documents of one token, and a state": ([[1, 1, 1, 127]], (1, 3), (6, 70), True),
    "a state of another document": ([[5, 3], [8, 0]], (2, 2), (5, 3), True),
}
"""Document lengths by row, heads and widths for keys and values, and whether there is a state."""

WIDE = {
    "keys of 96": ([[100, 156], [256]], (2, 4), (96, 64), True),
    "keys and values of 128": ([[100, 1, 199], [300]], (2, 4), (128, 128), False),
    "long rows": ([[1000, 24, 3072], [4096]], (2, 32), (128, 64), True),
}
"""Cases too long for the interpreter."""

DTYPES = (torch.float32, torch.bfloat16)


def compare(case: tuple[list[list[int]], tuple[int, int], tuple[int, int], bool], dtype: torch.dtype) -> None:
    """Compare results, states and gradients with float64."""
    (lengths, heads, widths, has_state), rows = case, len(case[0])
    drawn = draw_recurrence(sum(lengths[0]), heads, widths, rows)[:4]
    learned = [x.to(DEVICE, dtype).requires_grad_() for x in drawn[:2]]
    learned += [x.to(DEVICE, torch.float32).requires_grad_() for x in drawn[2:]]  # as Mamba-2's layer has them
    state = torch.randn(rows, heads[1], *widths, device=DEVICE).requires_grad_() if has_state else None
    compare_rules(state_space_triton, state_space_eager, learned, create_documents(lengths, True, DEVICE), state)


@pytest.mark.parametrize(("case", "dtype"), [*(product(CASES, DTYPES) if IS_GPU else zip(CASES, cycle(DTYPES)))])
def test_triton_equals_eager(case: str, dtype: torch.dtype) -> None:
    """For any borders, widths, head groups and states, results and gradients are as in float64."""
    compare(CASES[case], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), [*product(WIDE, DTYPES)])
def test_wide_and_long_rows_equal_eager(case: str, dtype: torch.dtype) -> None:
    """Several key heads, the widest tiles and long rows, in which a GPU keeps several tiles in flight, are right."""
    compare(WIDE[case], dtype)


def test_documents_are_isolated_to_the_bit() -> None:
    """Replacing other documents changes no bit of a document, and its loss has zero gradients elsewhere."""
    documents = create_documents([[30, 60, 20]], True, DEVICE)
    ours = documents.ids[0] == 1
    inputs, others = (draw_recurrence(110, rows=1).map(lambda x: x.to(DEVICE).float()).learned() for _ in range(2))
    replaced = replace_tokens(inputs, others, ours)
    actual, changed = (state_space_triton(*x[:4], documents)[0][:, ours] for x in (inputs, replaced))
    assert torch.equal(actual, changed)
    for grad in torch.autograd.grad(actual.square().sum(), inputs[:4]):
        assert not bool(grad[:, ~ours].any())


def test_empty_rows_and_wide_keys() -> None:
    """Without tokens the state is returned; keys too wide for a program have the eager results."""
    documents = number_recurrent_documents(torch.zeros(2, 0, dtype=torch.int64, device=DEVICE))
    state: Tensor = torch.randn(2, 4, 6, 5, device=DEVICE, requires_grad=True)
    q, k, v, g, _ = draw_recurrence(0).map(lambda x: x.to(DEVICE).float())
    mixed, last = state_space_triton(q, k, v, g, documents, state)
    assert mixed.shape == (2, 0, 4, 5) and torch.equal(last, state)
    assert bool((torch.autograd.grad(last.sum(), state)[0] == 1).all())
    q, k, v, g, _ = draw_recurrence(3, widths=(129, 4)).map(lambda x: x.to(DEVICE).float())
    documents = create_documents([[1, 2], [3]], True, DEVICE)
    torch.testing.assert_close(state_space_triton(q, k, v, g, documents), state_space_eager(q, k, v, g, documents))
