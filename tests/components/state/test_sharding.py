"""Pytrees sharded by microbatch and joined again."""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.state.sharding import check_spec, shard_tree, unshard_tree
from drawloom.components.state.specs import Replicate, Shard, Stack
from drawloom.components.state.trees import list_labelled_children


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


@attrs.frozen
class Case:
    """A whole and its shards: shards are drawn, and the whole is constructed from them."""

    whole: Any
    shards: list[Any]
    spec: Any


def _numbers(draw: Any, shape: list[int]) -> np.ndarray:
    size = int(np.prod(shape))
    return np.array(draw(st.lists(st.integers(-99, 99), min_size=size, max_size=size)), dtype=np.int64).reshape(shape)


@st.composite
def tensor_cases(draw: Any, count: int) -> Case:
    """Return a tensor, sharded or stacked along some dimension; numpy is the oracle."""
    stacked = draw(st.booleans())
    shape = draw(st.lists(st.integers(0, 3), min_size=0 if stacked else 1, max_size=3))
    dimensions = len(shape) + stacked
    dim = draw(st.integers(-dimensions, dimensions - 1))
    parts = [_numbers(draw, shape) for _ in range(count)]
    whole = np.stack(parts, dim) if stacked else np.concatenate(parts, dim)
    spec = Stack(dim) if stacked else Shard(dim)
    return Case(torch.from_numpy(whole), [torch.from_numpy(part) for part in parts], spec)


@st.composite
def leaf_cases(draw: Any, count: int) -> Case:
    """Draw a list split over ranks, one item by rank, or a value or None that is equal on all ranks."""
    kind = draw(st.sampled_from(["list", "items", "same", "none"]))
    if kind == "list":
        size = draw(st.integers(0, 3))
        parts = [draw(st.lists(st.integers(), min_size=size, max_size=size)) for _ in range(count)]
        return Case([item for part in parts for item in part], parts, Shard())
    if kind == "items":
        items = draw(st.lists(st.text(max_size=2), min_size=count, max_size=count))
        return Case(items, items, Stack())
    if kind == "none":
        return Case(None, [None] * count, draw(st.sampled_from([Shard(), Stack(), Replicate()])))
    value = draw(st.one_of(st.floats(), st.text(), st.just(torch.tensor([1.0, float("nan")]))))
    return Case(value, [value] * count, Replicate())


def _nodes(inner: st.SearchStrategy[Case]) -> st.SearchStrategy[Case]:
    def as_dict(cases: dict[str, Case]) -> Case:
        def pick(choose: Callable[[Case], Any]) -> dict[str, Any]:
            return {key: choose(case) for key, case in cases.items()}

        count = next((len(case.shards) for case in cases.values()), 0)
        rows = [pick(lambda case, row=row: case.shards[row]) for row in range(count)]  # type: ignore[misc]
        return Case(pick(lambda case: case.whole), rows, pick(lambda case: case.spec))

    def as_rows(cases: tuple[Case, Case]) -> Case:
        first, second = cases
        rows = [Rows(one, other) for one, other in zip(first.shards, second.shards, strict=True)]
        return Case(Rows(first.whole, second.whole), rows, Rows(first.spec, second.spec))

    def as_list(case: Case) -> Case:
        return Case([case.whole], [[part] for part in case.shards], [case.spec])

    dicts = st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(as_dict)
    return st.one_of(dicts, st.tuples(inner, inner).map(as_rows), inner.map(as_list))


def cases(count: int) -> st.SearchStrategy[Case]:
    """Trees whose spec is a tree too."""
    return st.recursive(st.one_of(tensor_cases(count), leaf_cases(count)), _nodes, max_leaves=4)


@given(st.integers(1, 4).flatmap(cases))
def test_sharding_and_joining_are_inverse(case: Case) -> None:
    """Sharding the whole gives the shards, and joining the shards gives the whole, for any tree."""
    assert same(list(shard_tree(case.whole, case.spec, len(case.shards))), case.shards)
    assert same(unshard_tree(case.shards, case.spec), case.whole)


@given(st.integers(0, 20), st.integers(1, 6), st.booleans())
def test_uneven_shards_differ_by_one_at_most(size: int, count: int, as_list: bool) -> None:
    """With even=False, the first shards are larger by one, and together they are the whole."""
    whole: Any = list(range(size)) if as_list else torch.arange(size)
    parts = shard_tree(whole, Shard(), count, even=False)
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert same(unshard_tree(parts, Shard()), whole)


def test_one_spec_applies_to_a_whole_tree() -> None:
    """A leaf spec applies to every tensor below, in dicts, tuples and classes, and leaves None as it is."""
    tree = {"rows": Rows(torch.arange(4), None), "pair": (torch.ones(2, 3), ["a", "b"])}
    first, second = shard_tree(tree, Shard(), 2)
    assert same(first, {"rows": Rows(torch.tensor([0, 1]), None), "pair": (torch.ones(1, 3), ["a"])})
    assert same(unshard_tree([first, second], Shard()), tree)


def test_shards_of_a_tensor_are_views() -> None:
    """Sharding a tensor copies nothing."""
    whole = torch.arange(6)
    assert [part.data_ptr() - whole.data_ptr() for part in shard_tree(whole, Shard(), 3)] == [0, 16, 32]


def test_equal_but_distinct_replicas_are_joined() -> None:
    """NaN equals NaN where replicas are compared, in tensors, arrays and numbers."""
    for make in (lambda: torch.tensor([1, float("nan")]), lambda: np.array([1, np.nan]), lambda: float("nan")):
        assert unshard_tree([make(), make()], Replicate()) is not None
    assert unshard_tree([["a", torch.ones(1)], ["a", torch.ones(1)]], Replicate())[0] == "a"


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "uneven tensor": (
        lambda: shard_tree({"x": torch.ones(2, 5)}, Shard(1), 2),
        r"at ['x']: a tensor of shape (2, 5) can't be cut evenly into 2 along dimension 1; "
        "Replicate() would give each microbatch all of it",
    ),
    "uneven list": (
        lambda: shard_tree([1, 2, 3], Shard(), 2),
        "a list of 3 can't be cut evenly into 2 along dimension 0; Replicate() would give each microbatch all of it",
    ),
    "wrong stack": (
        lambda: shard_tree(torch.ones(3, 2), Stack(), 2),
        "a tensor of shape (3, 2) has size 3 along dimension 0, not one entry for each of 2 microbatches",
    ),
    "scalar": (
        lambda: shard_tree(torch.ones(()), Shard(), 2),
        "a tensor of shape () has no dimension for Shard(dim=0); write Stack()",
    ),
    "scalars": (
        lambda: unshard_tree([torch.ones(()), torch.ones(())], Shard()),
        "a tensor of shape () has no dimension for Shard(dim=0); write Stack()",
    ),
    "dimension": (
        lambda: unshard_tree([torch.ones(2)] * 2, Stack(2)),
        "a tensor of shape (2,) has no dimension for Stack(dim=2); write a dimension below 2",
    ),
    "text": (
        lambda: shard_tree(Rows("a", 1), Shard(), 2),
        "at .tokens: a str can't be cut or joined by Shard(dim=0), only tensors and lists can",
    ),
    "list along 1": (
        lambda: shard_tree(["a", "b"], Shard(1), 2),
        "a list only has dimension 0, but the specification is Shard(dim=1)",
    ),
    "numbers along 1": (
        lambda: unshard_tree([10, 11], Stack(1)),
        "a list only has dimension 0, but the specification is Stack(dim=1)",
    ),
    "cut of numbers along 1": (
        lambda: shard_tree([10, 11], Stack(1), 2),
        "a list only has dimension 0, but the specification is Stack(dim=1)",
    ),
    "shapes": (
        lambda: unshard_tree([torch.ones(1, 2), torch.ones(1, 3)], Shard()),
        "Shard(dim=0) can't join the microbatches' tensors, a tensor of shape (1, 2), a tensor of shape "
        "(1, 3); use shapes that differ only in dimension 0",
    ),
    "kinds": (
        lambda: unshard_tree([torch.ones(1), [1]], Shard()),
        "microbatches have values of different forms: a tensor of shape (1,), a list of 1",
    ),
    "forms": (
        lambda: unshard_tree([{"x": {"a": 1}}, {"x": {"b": 1}}], Stack()),
        "at ['x']: microbatch 1 and the first one do not both have ['a'], ['b']; write the same entries in all",
    ),
    "a leaf and a node": (
        lambda: unshard_tree([1, {"b": 1}], Stack()),
        "microbatches have values of different forms: an int, a dict",
    ),
    "replicas": (
        lambda: unshard_tree([(torch.ones(2), 1), (torch.ones(2), 2)], Replicate()),
        "at [1]: the spec is Replicate(), but microbatches 0 and 1 have different values; write Stack()",
    ),
    "replicas of other shapes": (
        lambda: unshard_tree([torch.ones(2), torch.ones(1)], Replicate()),
        "the spec is Replicate(), but microbatches 0 and 1 have different values; write Stack()",
    ),
    "tree of specifications": (
        lambda: shard_tree({"a": 1, "b": 2}, {"a": Replicate()}, 2),
        "the specification has ['a'] here, but the value has ['a'], ['b']",
    ),
    "specification of a leaf": (
        lambda: shard_tree({"a": 1}, {"a": [Shard()]}, 2),
        "at ['a']: the specification has [0] here, but the value is a leaf",
    ),
    "no specification": (
        lambda: check_spec({"a": [Shard(), 0]}),
        "at ['a'][1]: 0 is not a sharding spec; write Shard(dim), Stack(dim) or Replicate()",
    ),
    "nothing to join": (lambda: unshard_tree([], Shard()), "there are no shards to join"),
    "no parts": (
        lambda: shard_tree(torch.ones(2), Shard(), 0),
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
