"""Tensor slices, saved in one layout of ranks and loaded in another."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.components.checkpoint.pieces import assemble_pieces, find_rows_unless_all, is_piece_needed
from drawloom.components.checkpoint.snapshot import mark_slices
from drawloom.components.ports.slices import SlicedTensor, TensorSlice

Cuts = list[list[int]]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[TensorSlice]:
    """Draw boxes tiling a shape: all dimensions are cut somewhere, also into empty parts."""
    edges = []
    for length in shape:
        inner = sorted(draw(st.lists(st.integers(0, length), max_size=2)))
        edges.append(list(itertools.pairwise([0, *inner, length])))
    boxes = itertools.product(*edges)
    return [TensorSlice(shape, tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in boxes]


def numbers(shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of different numbers."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


@given(st.data())
def test_slices_of_any_layout_load_into_any_other(data: st.DataObject) -> None:
    """Every slice in the new layout has the whole tensor's elements, from the needed pieces alone."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    whole = numbers(shape)
    saved, wanted = data.draw(layouts(shape)), data.draw(layouts(shape))
    pieces: list[Any] = [
        mark_slices({"mean": whole[tensor_slice.index()], "steps": torch.tensor(3)}, tensor_slice)
        for tensor_slice in saved
    ]
    for tensor_slice in [*wanted, None]:
        needed = [
            piece
            for piece, saved_slice in zip(pieces, saved, strict=True)
            if is_piece_needed([saved_slice], tensor_slice)
        ]
        assembled = assemble_pieces(needed, tensor_slice)
        expected = whole if tensor_slice is None else whole[tensor_slice.index()]
        assert torch.equal(assembled["mean"], expected) and assembled["steps"].item() == 3
        exact = [saved_slice for saved_slice in saved if tensor_slice is not None and saved_slice.overlap(tensor_slice)]
        assert tensor_slice is None or not tensor_slice.numel or len(needed) == len(exact)


def test_a_whole_tensor_is_cut() -> None:
    """A sharded rank gets its part of a tensor saved by one process; other values are unchanged."""
    tensor_slice = TensorSlice((4, 3), (1, 0), (2, 3))
    assembled = assemble_pieces([{"mean": numbers((4, 3)), "steps": 7, "step": torch.tensor(1.0)}], tensor_slice)
    assert assembled["mean"].tolist() == [[3, 4, 5], [6, 7, 8]]
    assert assembled["steps"] == 7 and assembled["step"].ndim == 0


def test_a_slice_of_another_shape_is_given_whole() -> None:
    """A model of other sizes gets the whole tensor, whose shape its error can name."""
    saved = [SlicedTensor(numbers((2, 3)), TensorSlice((4, 3), (at, 0), (2, 3))) for at in (0, 2)]
    assembled = assemble_pieces([{"w": tensor} for tensor in saved], TensorSlice((6, 3), (0, 0), (3, 3)))
    assert assembled["w"].shape == (4, 3)


def test_a_missing_piece_is_an_error() -> None:
    """Elements saved by no rank are not made up."""
    part = SlicedTensor(numbers((2, 3)), TensorSlice((4, 3), (0, 0), (2, 3)))
    with pytest.raises(ValueError, match="6 of the 12 elements"):
        assemble_pieces([{"w": part}], None)


def test_replicated_slices_are_not_counted_twice() -> None:
    """Tensors without dimensions, or with other dimensions, are not slices."""
    tensor_slice = TensorSlice((4,), (0,), (2,))
    state = mark_slices(
        {"w": torch.zeros(2), "count": torch.tensor(1), "table": torch.zeros(2, 2), "text": "x"}, tensor_slice
    )
    assert [type(part).__name__ for part in state.values()] == ["SlicedTensor", "Tensor", "Tensor", "str"]
    assert mark_slices({"w": torch.zeros(2)}, None) == {"w": pytest.approx(torch.zeros(2))}


@given(st.data())
def test_needed_rows_are_as_few_as_possible(data: st.DataObject) -> None:
    """A saved tensor cut to these rows has every element of the overlap, and no row at either end without one."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    saved, wanted = (data.draw(st.sampled_from(data.draw(layouts(shape)))) for _ in range(2))
    whole = numbers(shape)
    part = find_rows_unless_all(saved.size, [(saved, wanted)])
    cut = part or TensorSlice.whole(saved.size)
    assert cut.size[1:] == saved.size[1:]
    common = saved.overlap(wanted)
    available = whole[saved.index()][cut.index()].flatten().tolist()
    needed = set(whole[common.index()].flatten().tolist()) if common else set()
    assert needed <= set(available)
    rows = whole[saved.index()][cut.index()]
    assert all(needed & set(row.flatten().tolist()) for row in (rows[:1], rows[-1:]) if rows.numel() and part)


def test_tensors_without_slices_are_read_whole() -> None:
    """All rows are read for a scalar, for a shape other than the slice's, and for a use of the whole tensor."""
    half = TensorSlice((4, 2), (0, 0), (2, 2))
    assert find_rows_unless_all((), [(None, half)]) is None
    assert find_rows_unless_all((3, 2), [(None, half)]) is None
    assert find_rows_unless_all((4, 2), [(None, half), (None, None)]) is None
    assert find_rows_unless_all((4, 2), [(None, half)]) == half
    assert find_rows_unless_all((4, 2), [(None, half), (None, TensorSlice((4, 2), (2, 1), (1, 1)))]) == TensorSlice(
        (4, 2), (0, 0), (3, 2)
    )
