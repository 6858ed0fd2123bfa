"""Which rank writes what, from what each of them holds."""

from collections.abc import Mapping, Sequence
from typing import Any

from drawloom.components.ports.model import Stages
from drawloom.components.ports.weights import Mapper
from drawloom.components.storage.format_names import format_names
from drawloom.graph import UserError


def holding(stages: Stages) -> dict[str, Any]:
    """What this rank holds, as JSON: its stages, each with shape and dtype of its parameters by name."""
    return {
        "stages": [
            {
                "index": stage.index,
                "tensors": {name: [list(p.shape), str(p.dtype)] for name, p in stage.module.named_parameters()},
            }
            for stage in stages.local
        ]
    }


def choose_owners(mapper: Mapper, holdings: Sequence[Mapping[str, Any]]) -> list[int]:
    """
    For each group of a mapper the first rank that holds all of its inputs.

    So of copies, replicas' or a tied head's, one is written. UserError lists what is missing and what has no place in
    the mapper, and names tensors of which ranks hold different ones.
    """
    held = [_tensors(each) for each in holdings]
    _compare(mapper, held)
    owners = []
    for group in mapper.groups:
        able = [rank for rank, tensors in enumerate(held) if tensors.keys() >= set(group.inputs)]
        if not able:
            names = f"{format_names(group.inputs)} become {format_names(group.outputs)}"
            told = f"{names} together, and no rank holds them all"
            raise UserError(f"the tensors to write are spread too widely: {told}; export from fewer pipeline stages")
        owners.append(able[0])
    return owners


def _tensors(rank: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kind for stage in rank["stages"] for name, kind in stage["tensors"].items()}


def _compare(mapper: Mapper, held: Sequence[Mapping[str, Any]]) -> None:
    """UserError unless the ranks hold the mapper's inputs, no others, and the same where they hold one twice."""
    wanted = dict.fromkeys(mapper.inputs)
    kinds: dict[str, Any] = {}
    for tensors in held:
        for name, kind in tensors.items():
            if kinds.setdefault(name, kind) != kind:
                raise UserError(f"{name} is {kinds[name]} on one rank and {kind} on another; give all the same model")
    lists = [
        ("missing", [name for name in wanted if name not in kinds]),
        ("no name there for", [name for name in kinds if name not in wanted]),
    ]
    if told := "; ".join(f"{what} {format_names(names)}" for what, names in lists if names):
        raise UserError(f"the tensors to write are not those of the model: {told}; export where all of it is held")
