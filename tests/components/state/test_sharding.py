"""Pytrees sharded by microbatch and joined again."""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.state import sharding
from drawloom.components.state.sharding import choose_spec_of_shard_leaf, choose_spec_of_whole_leaf
from drawloom.components.state.trees import Spec, list_labelled_children


@attrs.frozen
class Rows:
    tokens: Any
    note: Any


def same(one: Any, other: Any) -> bool:
    """Whether two trees are the same, type by type and number by number, NaN being the same as NaN."""
    here, there = list_labelled_children(one), list_labelled_children(other)
    if here is None or there is None:
        if isinstance(one, torch.Tensor):
            return isinstance(other, torch.Tensor) and _rows(one) == _rows(other)
        return repr(one) == repr(other)
    return (
        type(one) is type(other)
        and len(here) == len(there)
        and all(
            step == twin_step and same(child, twin)
            for (step, child), (twin_step, twin) in zip(here, there, strict=True)
        )
    )


def _rows(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, repr(tensor.tolist())


def shard_tree(tree: Any, spec: Spec, count: int) -> list[Any]:
    """Shard a tree with one spec for all leaves."""
    return sharding.shard_tree(tree, lambda _leaf: spec, count)


def unshard_tree(shards: list[Any], spec: Spec) -> Any:
    """Join shards with one spec for all leaves."""
    return sharding.unshard_tree(shards, lambda _leaf: spec)


@attrs.frozen
class Case:
    """A whole and its shards: shards are drawn, and the whole is constructed from them."""

    whole: Any
    shards: list[Any]


def _numbers(draw: Any, shape: list[int]) -> np.ndarray:
    size = int(np.prod(shape))
    return np.array(draw(st.lists(st.integers(-99, 99), min_size=size, max_size=size)), dtype=np.int64).reshape(shape)


@st.composite
def leaf_cases(draw: Any, spec: Spec, count: int) -> Case:
    """Return a tensor, a list or None, sharded, stacked or replicated; numpy is the oracle of tensors."""
    kind = draw(st.sampled_from(["tensor", "list", "none"]))
    if kind == "none":
        return Case(None, [None] * count)
    if spec == "replicate":
        value = draw(st.one_of(st.floats(), st.text(), st.just(torch.tensor([1.0, float("nan")]))))
        return Case(value, [value] * count)
    if kind == "tensor":
        shape = draw(st.lists(st.integers(0, 3), min_size=0 if spec == "stack" else 1, max_size=3))
        parts = [_numbers(draw, shape) for _ in range(count)]
        whole = np.stack(parts) if spec == "stack" else np.concatenate(parts)
        return Case(torch.from_numpy(whole), [torch.from_numpy(part) for part in parts])
    if spec == "stack":
        items = draw(st.lists(st.text(max_size=2), min_size=count, max_size=count))
        return Case(items, items)
    size = draw(st.integers(0, 3))
    rows = [draw(st.lists(st.integers(), min_size=size, max_size=size)) for _ in range(count)]
    return Case([item for row in rows for item in row], rows)


def _nodes(inner: st.SearchStrategy[Case]) -> st.SearchStrategy[Case]:
    def as_dict(cases: dict[str, Case]) -> Case:
        count = next((len(case.shards) for case in cases.values()), 0)
        rows = [{key: case.shards[row] for key, case in cases.items()} for row in range(count)]
        return Case({key: case.whole for key, case in cases.items()}, rows)

    def as_rows(cases: tuple[Case, Case]) -> Case:
        first, second = cases
        rows = [Rows(one, other) for one, other in zip(first.shards, second.shards, strict=True)]
        return Case(Rows(first.whole, second.whole), rows)

    dicts = st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(as_dict)
    return st.one_of(dicts, st.tuples(inner, inner).map(as_rows))


SPECS: list[Spec] = ["shard", "stack", "replicate"]


@given(st.data(), st.sampled_from(SPECS), st.integers(1, 4))
def test_sharding_and_joining_are_inverse(data: st.DataObject, spec: Spec, count: int) -> None:
    """Sharding the whole gives the shards, and joining the shards gives the whole, for any tree."""
    case = data.draw(st.recursive(leaf_cases(spec, count), _nodes, max_leaves=4))
    assert same(shard_tree(case.whole, spec, count), case.shards)
    assert same(unshard_tree(case.shards, spec), case.whole)


@pytest.mark.parametrize(
    ("value", "whole", "shard"),
    [
        (torch.ones(2, 3), "shard", "shard"),
        (torch.ones(()), "replicate", "stack"),
        ([1, 2], "shard", "shard"),
        (1.5, "replicate", "stack"),
    ],
)
def test_the_spec_of_a_leaf_is_inferred(value: Any, whole: Spec, shard: Spec) -> None:
    """Rows are sharded; a number is replicated if it was written as a whole, and stacked if written by shards."""
    assert (choose_spec_of_whole_leaf(value), choose_spec_of_shard_leaf(value)) == (whole, shard)


def test_one_spec_applies_to_a_whole_tree() -> None:
    """A leaf spec applies to every tensor below, in dicts, tuples and classes, and leaves None as it is."""
    tree = {"rows": Rows(torch.arange(4), None), "pair": (torch.ones(2, 3), ["a", "b"])}
    first, second = shard_tree(tree, "shard", 2)
    assert same(first, {"rows": Rows(torch.tensor([0, 1]), None), "pair": (torch.ones(1, 3), ["a"])})
    assert same(unshard_tree([first, second], "shard"), tree)


def test_shards_of_a_tensor_are_views() -> None:
    """Sharding a tensor copies nothing."""
    whole = torch.arange(6)
    assert [part.data_ptr() - whole.data_ptr() for part in shard_tree(whole, "shard", 3)] == [0, 16, 32]


def test_equal_but_distinct_replicas_are_joined() -> None:
    """NaN equals NaN where replicas are compared, in tensors, arrays and numbers."""
    for make in (lambda: torch.tensor([1, float("nan")]), lambda: np.array([1, np.nan]), lambda: float("nan")):
        assert unshard_tree([make(), make()], "replicate") is not None
    assert unshard_tree([["a", torch.ones(1)], ["a", torch.ones(1)]], "replicate")[0] == "a"


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "uneven tensor": (
        lambda: shard_tree({"x": torch.ones(5, 2)}, "shard", 2),
        "at ['x']: a tensor of shape (5, 2) can't be cut evenly into 2 along dimension 0; "
        '"replicate" would give each microbatch all of it',
    ),
    "uneven list": (
        lambda: shard_tree([1, 2, 3], "shard", 2),
        'a list of 3 can\'t be cut evenly into 2 along dimension 0; "replicate" would give each microbatch all of it',
    ),
    "wrong stack": (
        lambda: shard_tree(torch.ones(3, 2), "stack", 2),
        "a tensor of shape (3, 2) has size 3 along dimension 0, not one entry for each of 2 microbatches",
    ),
    "scalar": (
        lambda: shard_tree(torch.ones(()), "shard", 2),
        'a tensor of shape () has no dimension for "shard"; write a tensor with entries',
    ),
    "scalars": (
        lambda: unshard_tree([torch.ones(()), torch.ones(())], "shard"),
        'a tensor of shape () has no dimension for "shard"; write a tensor with entries',
    ),
    "text": (
        lambda: shard_tree(Rows("a", 1), "shard", 2),
        'at .tokens: a str can\'t be cut or joined by "shard", only tensors and lists can',
    ),
    "shapes": (
        lambda: unshard_tree([torch.ones(1, 2), torch.ones(1, 3)], "shard"),
        "\"shard\" can't join the microbatches' tensors, a tensor of shape (1, 2), a tensor of shape "
        "(1, 3); use shapes that differ only in dimension 0",
    ),
    "kinds": (
        lambda: unshard_tree([torch.ones(1), [1]], "shard"),
        "microbatches have values of different forms: a tensor of shape (1,), a list of 1",
    ),
    "forms": (
        lambda: unshard_tree([{"x": {"a": 1}}, {"x": {"b": 1}}], "stack"),
        "at ['x']: microbatch 1 and the first one do not both have ['a'], ['b']; write the same entries in all",
    ),
    "a leaf and a node": (
        lambda: unshard_tree([1, {"b": 1}], "stack"),
        "microbatches have values of different forms: an int, a dict",
    ),
    "replicas": (
        lambda: unshard_tree([(torch.ones(2), 1), (torch.ones(2), 2)], "replicate"),
        'at [1]: the spec is "replicate", but microbatches 0 and 1 have different values; write "stack"',
    ),
    "replicas of other shapes": (
        lambda: unshard_tree([torch.ones(2), torch.ones(1)], "replicate"),
        'the spec is "replicate", but microbatches 0 and 1 have different values; write "stack"',
    ),
    "nothing to join": (lambda: unshard_tree([], "shard"), "there are no shards to join"),
    "no parts": (
        lambda: shard_tree(torch.ones(2), "shard", 0),
        "a tree can't be sharded into 0 parts; write at least 1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_name_the_path_in_the_tree(fault: str) -> None:
    """Errors name the path, the problem, and a remedy if there is one."""
    work, message = FAULTS[fault]
    with pytest.raises(ValueError) as caught:
        work()
    assert str(caught.value) == message
