"""Mappers made of mappers: side by side, one behind the other, dealt out over workers, under other prefixes."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import attrs
from torch import Tensor

from drawloom.components.ports.weights import Mapper, TensorGroup


def same(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors as they are."""
    return tensors


def parallel(*mappers: Mapper) -> Mapper:
    """All of them side by side; ValueError if two take or give a tensor of one name."""
    merged = Mapper(tuple(group for mapper in mappers for group in mapper.groups))
    for what, names in (("taken", merged.inputs), ("given", merged.outputs)):
        if double := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"{', '.join(double)} would be {what} by more than one of the mappers side by side")
    return merged


def sequential(*mappers: Mapper) -> Mapper:
    """
    One behind the other; a tensor that one of them does not know passes it by.

    What a later one takes and no earlier one gives comes in from outside; what an earlier one gives and no later one
    takes goes out. Groups that touch are one group of the whole. ValueError if passing by would meet a tensor that
    is taken or given under that name already.
    """
    stages = [mapper for mapper in mappers if mapper.groups]
    if not stages:
        return Mapper(())
    return Mapper(tuple(_chain(parts) for parts in _connected(_without_gaps(stages))))


def shard(mapper: Mapper, count: int, index: int) -> Mapper:
    """One of `count` workers' share: every count-th group from the index-th on."""
    return Mapper(mapper.groups[index::count])


def prefixed(mapper: Mapper, source: str = "", target: str = "") -> Mapper:
    """The same with a prefix before every name that goes in, and one before every name that comes out."""
    return Mapper(
        tuple(
            attrs.evolve(
                group,
                inputs=tuple(source + name for name in group.inputs),
                outputs=tuple(target + name for name in group.outputs),
            )
            for group in mapper.groups
        )
    )


def giving(mapper: Mapper, names: Collection[str]) -> Mapper:
    """The groups that give at least one of these names."""
    wanted = frozenset(names)
    return Mapper(tuple(group for group in mapper.groups if not wanted.isdisjoint(group.outputs)))


def _without_gaps(mappers: Sequence[Mapper]) -> list[Mapper]:
    """Each takes exactly what the one before it gives."""
    stages = list(mappers)
    for place in range(len(stages) - 1, 0, -1):  # what is needed later is let through earlier
        given = set(stages[place - 1].outputs)
        stages[place - 1] = _letting_through(stages[place - 1], [n for n in stages[place].inputs if n not in given])
    for place in range(1, len(stages)):  # what was given earlier is let through later
        taken = set(stages[place].inputs)
        stages[place] = _letting_through(stages[place], [n for n in stages[place - 1].outputs if n not in taken])
    return stages


def _letting_through(mapper: Mapper, names: Iterable[str]) -> Mapper:
    passing = Mapper(tuple(TensorGroup((name,), (name,), same, same) for name in names))
    try:
        return parallel(mapper, passing)
    except ValueError as error:
        raise ValueError(f"a tensor can't pass a mapper by: {error}") from error


def _connected(stages: Sequence[Mapper]) -> Iterator[list[list[TensorGroup]]]:
    """The groups of all stages, parted into those that touch one another, in the order of the first stage's."""
    places = [(place, group) for place, stage in enumerate(stages) for group in stage.groups]
    forest = _Forest(len(places))
    givers = {(place, name): number for number, (place, group) in enumerate(places) for name in group.outputs}
    for number, (place, group) in enumerate(places):
        for name in group.inputs if place else ():
            forest.join(givers[place - 1, name], number)
    trees: dict[int, list[list[TensorGroup]]] = {}
    for number, (place, group) in enumerate(places):
        trees.setdefault(forest.root(number), [[] for _ in stages])[place].append(group)
    yield from trees.values()


class _Forest:
    """Which of so many numbers are joined to one another, directly or by way of others."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def root(self, number: int) -> int:
        """The number that stands for all that are joined to this one."""
        while (parent := self._parents[number]) != number:
            self._parents[number] = self._parents[parent]
            number = parent
        return number

    def join(self, first: int, second: int) -> None:
        """Join two numbers, and all that are joined to them."""
        low, high = sorted((self.root(first), self.root(second)))
        self._parents[high] = low


def _chain(stages: Sequence[Sequence[TensorGroup]]) -> TensorGroup:
    """Groups that touch as one group."""
    forth = _Chain(tuple(tuple(stage) for stage in stages))
    if any(group.revert is None for stage in stages for group in stage):
        return TensorGroup(forth.inputs, forth.outputs, forth)
    back = _Chain(tuple(tuple(group.inverse() for group in stage) for stage in reversed(stages)))
    return TensorGroup(forth.inputs, forth.outputs, forth, back)


@attrs.frozen
class _Chain:
    """Converts in stages, each of groups side by side; what a group gave is let go of as soon as it is used."""

    stages: tuple[tuple[TensorGroup, ...], ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(name for group in self.stages[0] for name in group.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for group in self.stages[-1] for name in group.outputs)

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        state = dict(zip(self.inputs, tensors, strict=True))
        for stage in self.stages:
            given: dict[str, Tensor] = {}
            for group in stage:
                taken = [state.pop(name) for name in group.inputs]
                given |= zip(group.outputs, group.convert(taken), strict=True)
            state = given
        return [state[name] for name in self.outputs]
