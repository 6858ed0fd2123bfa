"""Parameter groups: names of parameters that an optimizer trains otherwise than the rest."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import attrs
from torch import nn

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.model import KnownParameters
from drawloom.components.ports.pipeline import TrainableLoss
from drawloom.components.ports.stages import Parameters
from drawloom.graph import Problem, UserError, at_least, between, setting
from drawloom.graph.problems import KeyPath
from drawloom.graph.wiring.node import NodeView

What = Literal["parameter", "matrix"]
"""What patterns are compared with: all trained parameters, or those of two dimensions and more."""


def check_betas(value: tuple[float, float] | None) -> str | None:
    """The reason why betas are invalid, or None: each is from 0 to below 1."""
    return next((reason for beta in value or () if (reason := between(0, 1)(beta))), None)


def check_targets(patterns: list[str]) -> str | None:
    """The reason why patterns are invalid, or None: there is at least one."""
    return None if patterns else "an empty list names no parameter; write at least one pattern"


@attrs.frozen(kw_only=True)
class ParameterGroup:
    """
    Parameters by name, and what differs for them. What is left out is as the optimizer's settings say.

    A parameter that several groups name belongs to the first of them.
    """

    targets: list[str] = setting(check=check_targets, doc="patterns (fnmatch) of the names of the parameters")
    lr_multiplier: float = setting(default=1.0, check=at_least(0), doc="learning-rate multiplier")
    weight_decay: float | None = setting(
        default=None, check=at_least(0), doc="that of all parameters of the group, norms and biases included"
    )

    def options(self) -> dict[str, Any]:
        """What differs, as torch's parameter groups call it."""
        given = attrs.asdict(self, recurse=False)
        return {name: value for name, value in given.items() if name != "targets" and value is not None}


@attrs.frozen(kw_only=True)
class AdamGroup(ParameterGroup):
    """A group of an optimizer of the Adam kind."""

    betas: tuple[float, float] | None = setting(
        default=None, check=check_betas, doc="decay of the two running means of the group"
    )


def decays(parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases, which have one dimension."""
    return parameter.ndim >= 2


def param_groups(
    parameters: Parameters, groups: Sequence[ParameterGroup], weight_decay: float, mesh: Mesh
) -> list[dict[str, Any]]:
    """
    Every trained parameter once, in torch's form: `params`, `weight_decay`, `lr_multiplier`, and what a group sets.

    Of each group, and of the parameters in none, there are the matrices and, without weight decay, the vectors. They
    exist even if they are empty: torch takes no empty list of groups, and a pipeline rank whose parameters are all
    frozen has none to train. Raises UserError, on all ranks, for a pattern without a parameter.
    """
    named = parameters.named()
    places = places_of([name for name, _ in named], _targets(groups), mesh)
    found: list[dict[str, Any]] = []
    for place, group in enumerate([None, *groups]):
        mine = [part for (_, part), where in zip(named, places, strict=True) if where == place]
        options = {"lr_multiplier": 1.0} if group is None else group.options()
        matrices, vectors = ([part for part in mine if decays(part) == wanted] for wanted in (True, False))
        found.append({"params": matrices, "weight_decay": weight_decay} | options)
        found.append({"params": vectors, "weight_decay": 0.0} | options)
    return found


def unmatched(node: NodeView) -> Iterator[Problem]:
    """
    Warnings of patterns of an optimizer's groups, or of its `targets`, that no parameter of the model is left for.

    A model that has `KnownParameters` tells them; where adapters or transforms change them, or the loss is a
    `TrainableLoss`, the run alone knows them all. Of `targets` only matrices count.
    """
    groups, own_targets = node.settings["groups"], node.settings.get("targets")
    kinds: list[tuple[What, dict[str, list[str]], list[KeyPath]]] = [
        ("parameter", _targets(groups), [("groups", number, "targets") for number in range(len(groups))]),
        ("matrix", {} if own_targets is None else {"targets": own_targets}, [("targets",)]),
    ]
    stages = node.neighbour("parameters") if any(targets for _, targets, _ in kinds) else None
    parameters = _declared_parameters(stages) if stages else {}
    for what, targets, paths in kinds:
        names = [name for name, part in parameters.items() if what == "parameter" or decays(part)]
        for place, pattern, text in _faults(_placed(names, targets), targets, what):
            yield node.warning(paths[place], f"the pattern {pattern!r} {text}")


def _declared_parameters(stages: NodeView) -> dict[str, nn.Parameter]:
    """Return the parameters that the stages' model declares; {} if another part of the stages changes them."""
    model, loss = stages.neighbour("model"), stages.neighbour("loss")
    own = loss and loss.implements(TrainableLoss)
    if model is None or own or stages.neighbours("adapters") or stages.neighbours("transforms"):
        return {}
    return model.component.parameters_of(model) if issubclass(model.component, KnownParameters) else {}


def _targets(groups: Sequence[ParameterGroup]) -> dict[str, list[str]]:
    return {f"groups[{number}]": group.targets for number, group in enumerate(groups)}


def places_of(
    names: Sequence[str], targets: Mapping[str, Sequence[str]], mesh: Mesh, what: What = "parameter"
) -> list[int]:
    """
    The number of each name's patterns, from 1: the first that match, of those that settings have; 0 if none do.

    `targets` are the patterns by the name of their setting, `what` is what all names are of. Raises UserError, on all
    ranks, for a pattern that no name of any rank is left for.
    """
    placed = _placed(names, targets)
    # Asked of no rank where there are no patterns, as in most runs.
    if targets:
        pairs = mesh.pipeline_group.gather_json(placed)
        everywhere = [(str(name), int(place)) for each in pairs for name, place in each]
        for number, pattern, text in _faults(everywhere, targets, what):
            raise UserError(f"{[*targets][number]} of the optimizer: the pattern {pattern!r} {text}", exit_code=2)
    return [place for _, place in placed]


def _placed(names: Sequence[str], targets: Mapping[str, Sequence[str]]) -> list[tuple[str, int]]:
    """Each name with the number of its patterns, from 1, or 0."""
    return [
        (name, next((number for number, patterns in enumerate(targets.values(), 1) if _matches(name, patterns)), 0))
        for name in names
    ]


def _faults(
    placed: Sequence[tuple[str, int]], targets: Mapping[str, Sequence[str]], what: What
) -> Iterator[tuple[int, str, str]]:
    """The number of a setting from 0, a pattern of it that no name is left for, and what it matches instead."""
    # Nothing is trained at all: that is another fault, if it is one.
    if not placed:
        return
    for number, (setting_name, patterns) in enumerate(targets.items()):
        for pattern in patterns:
            matched = [(name, place) for name, place in placed if fnmatchcase(name, pattern)]
            if not matched:
                # One in the middle is of a layer, where most that is trained otherwise is.
                yield number, pattern, f"matches no trained {what}; one is called {placed[len(placed) // 2][0]!r}"
            elif all(place != number + 1 for _, place in matched):
                name, place = matched[0]
                text = f"matches {name!r}, but that is in {[*targets][place - 1]}; write {setting_name} before it"
                yield number, pattern, text


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
