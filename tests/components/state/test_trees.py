"""Trees taken apart and put together."""

import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import attrs
import pytest
import torch

from drawloom.components.state.trees import (
    list_labelled_children,
    list_leaves,
    map_leaves,
    replace_children,
    replace_leaves,
)


class Pair(NamedTuple):
    left: Any
    right: Any


@attrs.frozen
class Frozen:
    x: Any
    _hidden: Any = attrs.field(init=False, default=7)


@attrs.define
class Guarded:
    x: int = attrs.field(validator=attrs.validators.instance_of(int))


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    x: Any
    made: Any = dataclasses.field(init=False, default=1)

    def __post_init__(self) -> None:
        if isinstance(self.x, str):
            raise ValueError(self.x)


TREES: list[tuple[Any, list[Any]]] = [
    (3, [3]),
    (None, [None]),
    ({"b": 1, "a": [2, (3,)]}, [1, 2, 3]),
    (OrderedDict(z=1, y=Pair(2, {"x": 3})), [1, 2, 3]),
    (defaultdict(list, {"a": 1}), [1]),
    (Frozen([1, 2]), [1, 2, 7]),
    (Record((1, 2)), [1, 2, 1]),
    (Guarded(5), [5]),
    ([], []),
    ({}, []),
]


@pytest.mark.parametrize(("tree", "expected"), TREES, ids=[type(tree).__name__ for tree, _ in TREES])
def test_leaves_come_in_order_and_go_back_in_it(tree: Any, expected: list[Any]) -> None:
    """All leaves of every kind of node are found, and a tree filled with its own leaves equals itself, in type too."""
    assert list_leaves(tree) == expected
    again = replace_leaves(tree, expected)
    assert again == tree
    assert type(again) is type(tree)


@pytest.mark.parametrize("tree", [{"a": 1}, [1], Frozen(1), Record(1), Guarded(1)])
def test_nodes_are_new(tree: Any) -> None:
    """Changing the result of `map_leaves` leaves the original alone."""
    changed = map_leaves(lambda leaf: "changed", tree)
    assert set(list_leaves(changed)) == {"changed"}
    assert "changed" not in list_leaves(tree)


def test_rebuilding_a_node_calls_no_constructor() -> None:
    """Leaves need not suit the constructor, such as specifications instead of tensors."""
    assert replace_children(Record(1), ["no number", 2]).x == "no number"
    assert replace_children(Guarded(1), ["no number"]).x == "no number"


def test_children_are_named_as_they_are_written() -> None:
    """A child's name is the Python expression for it."""
    for tree, _ in TREES:
        for step, child in list_labelled_children(tree) or []:
            assert eval(f"tree{step}", {"tree": tree}) is child


def test_tensors_and_classes_are_leaves() -> None:
    """Everything but containers is a leaf, also a torch.Size and an attrs class (not an instance)."""
    for leaf in (torch.ones(2), torch.Size([1, 2]), "text", Frozen, Record, {1}):
        assert list_labelled_children(leaf) is None
