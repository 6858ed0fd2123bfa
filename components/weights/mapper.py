"""Combinations of mappers: parallel, sequential, sharded over workers, and with prefixes."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import attrs
from torch import Tensor

from drawloom.ports import Mapper, TensorGroup


def return_unchanged(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors, any shape, unchanged and without a copy."""
    return tensors


def parallel(*mappers: Mapper) -> Mapper:
    """Combine all mappers' groups. Raises ValueError if two mappers share an input or an output."""
    merged = Mapper(tuple(group for mapper in mappers for group in mapper.groups))
    for role, names in (("an input", merged.inputs), ("an output", merged.outputs)):
        if duplicates := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"{', '.join(duplicates)} would be {role} of more than one parallel mapper")
    return merged


def sequential(*mappers: Mapper) -> Mapper:
    """
    Apply mappers one after another; a mapper passes on other tensors than its inputs unchanged.

    A later mapper's inputs are inputs of the chain if no earlier mapper outputs them; an earlier mapper's outputs are
    outputs of the chain if no later mapper consumes them. Groups with shared tensors become one group. Raises
    ValueError if a passed-on tensor has the name of a mapper's input or output.
    """
    stages = [mapper for mapper in mappers if mapper.groups]
    if not stages:
        return Mapper(())
    return Mapper(
        tuple(
            _combine_into_one_group(parts)
            for parts in _find_connected_groups(_extend_each_mapper_by_identities(stages))
        )
    )


def select_outputs(mapper: Mapper, names: Collection[str]) -> Mapper:
    """Return the groups with at least one output among the names."""
    wanted = frozenset(names)
    return Mapper(tuple(group for group in mapper.groups if not wanted.isdisjoint(group.outputs)))


def _extend_each_mapper_by_identities(mappers: Sequence[Mapper]) -> list[Mapper]:
    """Add identities to the mappers, so that every mapper's inputs are exactly the previous mapper's outputs."""
    stages = list(mappers)
    for index in range(len(stages) - 1, 0, -1):  # inputs of later mappers pass earlier ones
        outputs = set(stages[index - 1].outputs)
        stages[index - 1] = _extend_by_identities(
            stages[index - 1], [n for n in stages[index].inputs if n not in outputs]
        )
    for index in range(1, len(stages)):  # outputs of earlier mappers pass later ones
        inputs = set(stages[index].inputs)
        stages[index] = _extend_by_identities(stages[index], [n for n in stages[index - 1].outputs if n not in inputs])
    return stages


def _extend_by_identities(mapper: Mapper, names: Iterable[str]) -> Mapper:
    """
    Add groups to a mapper that return the named tensors unchanged. Raises ValueError if it already has one of the
    names.
    """
    passing = Mapper(tuple(TensorGroup((name,), (name,), return_unchanged, return_unchanged) for name in names))
    try:
        return parallel(mapper, passing)
    except ValueError as error:
        raise ValueError(f"sequential mappers can't pass a tensor on unchanged: {error}") from error


def _find_connected_groups(stages: Sequence[Mapper]) -> Iterator[list[list[TensorGroup]]]:
    """Yield connected components among all stages' groups, ordered by their first groups."""
    groups = [(index, group) for index, stage in enumerate(stages) for group in stage.groups]
    forest = _Forest(len(groups))
    producers = {(index, name): number for number, (index, group) in enumerate(groups) for name in group.outputs}
    for number, (index, group) in enumerate(groups):
        for name in group.inputs if index else ():
            forest.merge_sets(producers[index - 1, name], number)
    trees: dict[int, list[list[TensorGroup]]] = {}
    for number, (index, group) in enumerate(groups):
        trees.setdefault(forest.find_root(number), [[] for _ in stages])[index].append(group)
    yield from trees.values()


class _Forest:
    """Union-find: disjoint sets over the numbers from 0 to `count` - 1."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def find_root(self, number: int) -> int:
        """Return the representative for a number's set."""
        while (parent := self._parents[number]) != number:
            self._parents[number] = self._parents[parent]  # path halving
            number = parent
        return number

    def merge_sets(self, first: int, second: int) -> None:
        """Merge two numbers' sets."""
        # the lower root wins, so that the result does not depend on the order of joins
        low, high = sorted((self.find_root(first), self.find_root(second)))
        self._parents[high] = low


def _combine_into_one_group(stages: Sequence[Sequence[TensorGroup]]) -> TensorGroup:
    """Combine connected groups from several stages into one group."""
    forth = _StagedConversion(tuple(tuple(stage) for stage in stages))
    if any(group.revert is None for stage in stages for group in stage):
        return TensorGroup(forth.inputs, forth.outputs, forth)
    back = _StagedConversion(tuple(tuple(group.inverse() for group in stage) for stage in reversed(stages)))
    return TensorGroup(forth.inputs, forth.outputs, forth, back)


@attrs.frozen
class _StagedConversion:
    """Function that converts tensors stage by stage, group by group; it frees a tensor as soon as it is consumed."""

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
            outputs: dict[str, Tensor] = {}
            for group in stage:
                inputs = [state.pop(name) for name in group.inputs]
                outputs |= zip(group.outputs, group.convert(inputs), strict=True)
            state = outputs
        return [state[name] for name in self.outputs]
