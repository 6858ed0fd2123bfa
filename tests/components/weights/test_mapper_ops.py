"""The smallest mappers, and their inverses."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.components.ports.weights import Mapper, TensorGroup
from drawloom.components.weights.load import convert_tensors
from drawloom.components.weights.mapper import (
    chunk,
    concatenate,
    concatenate_blocks,
    identity,
    parallel,
    rename,
    squeeze,
    stack,
    to_dtype,
    transpose,
    unsqueeze,
    unstack,
)

NAMES = ["layers.0.attention.q", "layers.0.attention.k", "layers.10.attention.q", "norm"]


def numbers(*shape: int) -> Tensor:
    """0, 1, 2 ... in a shape."""
    return torch.arange(torch.Size(shape).numel()).view(shape)


LEAVES: dict[str, tuple[Mapper, dict[str, Tensor], dict[str, Tensor]]] = {
    "identity": (identity("a", "b"), {"a": numbers(2), "b": numbers(3)}, {"a": numbers(2), "b": numbers(3)}),
    "rename": (rename({"a": "b", "b": "a"}), {"a": numbers(2), "b": numbers(3)}, {"b": numbers(2), "a": numbers(3)}),
    "transpose": (transpose("a", 0, 2), {"a": numbers(2, 3, 4)}, {"a": numbers(2, 3, 4).permute(2, 1, 0)}),
    "squeeze": (squeeze("a", 1), {"a": numbers(2, 1, 3)}, {"a": numbers(2, 3)}),
    "unsqueeze": (unsqueeze("a", -1), {"a": numbers(2)}, {"a": numbers(2, 1)}),
    "stack": (
        stack(["b", "a"], "c", 1),
        {"a": numbers(2), "b": numbers(2) + 5},
        {"c": torch.tensor([[5, 0], [6, 1]])},
    ),
    "unstack": (unstack("c", ["b", "a"]), {"c": numbers(2, 3)}, {"b": numbers(3), "a": numbers(3) + 3}),
    "concatenate": (
        concatenate(["a", "b"], "c", 1),
        {"a": numbers(1, 2), "b": numbers(1, 2) + 9},
        {"c": torch.tensor([[0, 1, 9, 10]])},
    ),
    "concatenate of sizes": (
        concatenate(["q", "k", "v"], "qkv", 0, [4, 1, 1]),
        {"q": numbers(4, 2), "k": numbers(1, 2) + 8, "v": numbers(1, 2) + 10},
        {"qkv": numbers(6, 2)},
    ),
    "chunk": (chunk("c", ["a", "b"], -1), {"c": numbers(1, 4)}, {"a": numbers(1, 2), "b": numbers(1, 2) + 2}),
}


@pytest.mark.parametrize(("mapper", "tensors", "expected"), LEAVES.values(), ids=LEAVES.keys())
def test_a_mapper_and_its_inverse_give_the_tensors_back(
    mapper: Mapper, tensors: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    """An elementary mapper converts as named, and its inverse restores the input bit by bit."""
    given = convert_tensors(mapper, tensors)
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], expected[name]) for name in expected)
    back = convert_tensors(mapper.inverse(), given)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


MISFITS: dict[str, tuple[Mapper, dict[str, Tensor], str]] = {
    "squeeze": (squeeze("a", 0), {"a": numbers(2)}, "dimension 0 has size 2, not 1"),
    "unstack": (unstack("a", ["b", "c"]), {"a": numbers(3)}, "dimension 0 has size 3, not 2"),
    "chunk": (chunk("a", ["b", "c"]), {"a": numbers(3)}, "can't be cut into 2 of one size"),
    "chunk of sizes": (chunk("a", ["b", "c"], 0, [1, 1]), {"a": numbers(3)}, r"into pieces of sizes \[1, 1\]"),
    "concatenate": (
        concatenate(["b", "c"], "a"),
        {"b": numbers(1), "c": numbers(3)},
        r"\[1, 3\], but needs equal ones",
    ),
    "of sizes": (concatenate(["b", "c"], "a", 0, [2, 2]), {"b": numbers(1), "c": numbers(3)}, r"but needs \[2, 2\]"),
}


@pytest.mark.parametrize(("mapper", "tensors", "message"), MISFITS.values(), ids=MISFITS.keys())
def test_sizes_that_cannot_be_undone_are_refused(mapper: Mapper, tensors: dict[str, Tensor], message: str) -> None:
    """A tensor of the wrong size for a leaf is refused, also where torch would accept it."""
    with pytest.raises(ValueError, match=message):
        convert_tensors(mapper, tensors)


@pytest.mark.parametrize("names", [[], ["a", "a"]])
@pytest.mark.parametrize("make", [lambda names: stack(names, "b"), lambda names: unstack("b", names)])
def test_groups_name_each_tensor_once(make: Callable[[list[str]], Mapper], names: list[str]) -> None:
    """A group without names, or with one twice, is no group."""
    with pytest.raises(ValueError, match="at least one name, and each once"):
        make(names)


def test_a_mapper_without_inverse_is_reported() -> None:
    """A group without inverse raises an error as soon as its inverse is requested."""
    one_way = Mapper((TensorGroup(("a",), ("b",), lambda tensors: tensors),))
    with pytest.raises(ValueError, match="the conversion of a to b has no inverse"):
        one_way.inverse()


@given(dim=st.integers(-3, 2), count=st.integers(1, 4), data=st.data())
def test_a_tensor_chunked_and_concatenated_is_unchanged(dim: int, count: int, data: st.DataObject) -> None:
    """Pieces with any sizes along any dimension, stacked slices too, join to the original tensor."""
    shape = [2, 3, 2]
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    shape[dim] = sum(sizes)
    whole = torch.randn(shape)
    names = [f"part{number}" for number in range(count)]
    cut = chunk("whole", names, dim, sizes)
    parts = convert_tensors(cut, {"whole": whole})
    assert [parts[name].size(dim) for name in names] == sizes
    assert torch.equal(convert_tensors(cut.inverse(), parts)["whole"], whole)
    shape[dim] = count
    whole = torch.randn(shape)
    apart = unstack("whole", names, dim)
    assert torch.equal(convert_tensors(apart.inverse(), convert_tensors(apart, {"whole": whole}))["whole"], whole)


def test_to_dtype_casts_floating_point_tensors_alone() -> None:
    """Whole numbers keep their dtype."""
    given = {"a": torch.rand(3), "b": torch.arange(3)}
    converted = convert_tensors(parallel(to_dtype("a", torch.bfloat16), to_dtype("b", torch.bfloat16)), given)
    assert torch.equal(converted["a"], given["a"].bfloat16()) and torch.equal(converted["b"], given["b"])


def test_blocks_are_concatenated_one_after_another() -> None:
    """The first blocks of all tensors come before the second blocks, and the inverse separates them again."""
    first, second = torch.arange(4).view(4, 1), torch.arange(10, 12).view(2, 1)
    mapper = concatenate_blocks(["a", "b"], "both", 2, [2, 1])
    joined = convert_tensors(mapper, {"a": first, "b": second})
    assert joined["both"].flatten().tolist() == [0, 1, 10, 2, 3, 11]
    separate = convert_tensors(mapper.inverse(), joined)
    assert torch.equal(separate["a"], first) and torch.equal(separate["b"], second)
    with pytest.raises(ValueError, match="dimension 0 has size 5, not 6"):
        convert_tensors(mapper.inverse(), {"both": torch.zeros(5, 1)})
