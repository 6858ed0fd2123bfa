"""Combines mappers: in parallel, in sequence, sharded over workers, under other prefixes."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import attrs
from torch import Tensor

from drawloom.components.ports.weights import Mapper, TensorGroup


def same(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The identity: tensors of any shape, not copied."""
    return tensors


def parallel(*mappers: Mapper) -> Mapper:
    """The groups of all mappers; ValueError if two mappers share an input or an output."""
    merged = Mapper(tuple(group for mapper in mappers for group in mapper.groups))
    for what, names in (("an input", merged.inputs), ("an output", merged.outputs)):
        if double := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"{', '.join(double)} would be {what} of more than one parallel mapper")
    return merged


def sequential(*mappers: Mapper) -> Mapper:
    """
    Mappers applied one after another; a tensor that a mapper does not have as an input is passed on unchanged.

    Inputs of a later mapper that no earlier one outputs are inputs of the whole; outputs of an earlier one that no
    later one consumes are outputs of the whole. Groups that share tensors become one group. Raises ValueError if a
    tensor that is passed on has the name of an input or output of the mapper.
    """
    stages = [mapper for mapper in mappers if mapper.groups]
    if not stages:
        return Mapper(())
    return Mapper(tuple(_chain(parts) for parts in _connected(_without_gaps(stages))))


def shard(mapper: Mapper, count: int, index: int) -> Mapper:
    """The share of one of `count` workers: every count-th group from `index` on."""
    return Mapper(mapper.groups[index::count])


def prefixed(mapper: Mapper, source: str = "", target: str = "") -> Mapper:
    """The mapper with a prefix on all input names, and one on all output names."""
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
    """The groups with at least one of these names among their outputs."""
    wanted = frozenset(names)
    return Mapper(tuple(group for group in mapper.groups if not wanted.isdisjoint(group.outputs)))


def _without_gaps(mappers: Sequence[Mapper]) -> list[Mapper]:
    """The mappers, extended so that each has exactly the outputs of the one before it as inputs."""
    stages = list(mappers)
    for place in range(len(stages) - 1, 0, -1):  # inputs of later mappers pass earlier ones
        given = set(stages[place - 1].outputs)
        stages[place - 1] = _passing_on(stages[place - 1], [n for n in stages[place].inputs if n not in given])
    for place in range(1, len(stages)):  # outputs of earlier mappers pass later ones
        taken = set(stages[place].inputs)
        stages[place] = _passing_on(stages[place], [n for n in stages[place - 1].outputs if n not in taken])
    return stages


def _passing_on(mapper: Mapper, names: Iterable[str]) -> Mapper:
    passing = Mapper(tuple(TensorGroup((name,), (name,), same, same) for name in names))
    try:
        return parallel(mapper, passing)
    except ValueError as error:
        raise ValueError(f"a tensor can't be passed on unchanged: {error}") from error


def _connected(stages: Sequence[Mapper]) -> Iterator[list[list[TensorGroup]]]:
    """The connected components of the groups of all stages, in the order of their first groups."""
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
    """A disjoint-set forest (union-find) over the numbers from 0 to `count` - 1."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def root(self, number: int) -> int:
        """The representative of the set of a number."""
        while (parent := self._parents[number]) != number:
            self._parents[number] = self._parents[parent]  # path halving
            number = parent
        return number

    def join(self, first: int, second: int) -> None:
        """Merge the sets of two numbers."""
        # The lower root wins, so that the result does not depend on the order of joins.
        low, high = sorted((self.root(first), self.root(second)))
        self._parents[high] = low


def _chain(stages: Sequence[Sequence[TensorGroup]]) -> TensorGroup:
    """Connected groups of several stages as one group."""
    forth = _Chain(tuple(tuple(stage) for stage in stages))
    if any(group.revert is None for stage in stages for group in stage):
        return TensorGroup(forth.inputs, forth.outputs, forth)
    back = _Chain(tuple(tuple(group.inverse() for group in stage) for stage in reversed(stages)))
    return TensorGroup(forth.inputs, forth.outputs, forth, back)


@attrs.frozen
class _Chain:
    """Converts in stages of independent groups; an intermediate tensor is freed as soon as it is consumed."""

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
