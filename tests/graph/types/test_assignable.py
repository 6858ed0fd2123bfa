"""Assignability of annotated types."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, NewType, TypeVar

import pytest

from drawloom.graph.types.assignable import find_type_arguments, is_assignable, substitute_type_variables

K = TypeVar("K")
V = TypeVar("V")
Metres = NewType("Metres", float)


class Pairs(Mapping[K, V], Generic[V, K]):
    """Mapping with reversed type parameters."""


class Named(Pairs[int, str]):
    """Mapping of text to numbers."""


class Labelled(tuple[int, str]):
    """A number and its label."""


@pytest.mark.parametrize(
    ("given", "promised", "fine"),
    [
        (int, int, True),
        (bool, int, True),
        (int, float, True),
        (float, int, False),
        (int, str, False),
        (Any, str, True),
        (str, Any, True),
        (int, int | None, True),
        (int | None, int, False),
        (None, int | None, True),
        (Literal["a"], str, True),
        (str, Literal["a"], False),
        (Literal["a"], Literal["a", "b"], True),
        (Literal["a", "c"], Literal["a", "b"], False),
        (Literal[True], Literal[1], False),
        (list[int], Sequence[int], True),
        (list[int], Sequence[str], False),
        (list[bool], Iterable[int], True),
        (dict[str, int], Mapping[str, float], True),
        (dict[str, str], Mapping[str, float], False),
        (tuple[int, str], tuple[int, str], True),
        (tuple[int, str], tuple[int, int], False),
        (tuple[int, int], tuple[int, ...], True),
        (tuple[int, str], tuple[int, ...], False),
        (tuple[int, ...], tuple[int, int], False),
        (tuple[int], tuple[int, int], False),
        (Labelled, tuple[int, str], True),
        (Labelled, tuple[int], False),
        (Labelled, tuple[int, ...], False),
        (Labelled, tuple[int | str, ...], True),
        (Named, Mapping[str, int], True),
        (Named, Mapping[int, str], False),
        (Callable[[object], int], Callable[[str], object], True),
        (Callable[[str], int], Callable[[object], int], False),
        (Callable[[], int], Callable[[int], int], False),
        (Callable[..., int], Callable[[int], int], True),
        (Callable[[int], str], Callable[..., int], False),
        (int, Callable[[], int], False),
        (Annotated[int, "m"], int, True),
        (Metres, float, True),
        (Metres, str, False),
        ("NotRead", int, True),
    ],
)
def test_assignability_of_annotated_types(given: Any, promised: Any, fine: bool) -> None:
    """Types are assignable like in type checkers, and in doubt assignable."""
    assert is_assignable(given, promised) is fine


def test_type_arguments_are_followed_up_to_a_base() -> None:
    """Type arguments are followed in any order in which classes pass them to bases."""
    assert find_type_arguments(Named, Mapping) == {0: str, 1: int}
    assert list(find_type_arguments(Named, Pairs).values()) == [int, str]
    assert substitute_type_variables(Iterator[K], {K: int}) == Iterator[int]  # type: ignore[valid-type]
    assert substitute_type_variables(int, {K: int}) is int
