"""Parameter groups: parameters with their own optimizer options."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import attrs

from drawloom import NodeView, Problem, at_least, between, setting
from drawloom.graph.problems import KeyPath
from drawloom.ports import (
    Role,
    TrainableLoss,
    build_meta_module_if_known,
    parameter_roles,
)

ParameterKind = Literal["parameter", "matrix"]
"""Parameters that patterns are matched with: all trained parameters, or matrices by their roles."""


def find_betas_fault(value: tuple[float, float] | None) -> str | None:
    """Return why betas are invalid (a beta is at least 0 and below 1), or None if they are valid."""
    return next((reason for beta in value or () if (reason := between(0, 1)(beta))), None)


def find_targets_fault(patterns: list[str]) -> str | None:
    """Return why patterns are invalid (there is none), or None if they are valid."""
    return None if patterns else "an empty list names no parameter; write at least one pattern"


@attrs.frozen(kw_only=True)
class ParameterGroup:
    """
    Parameters matched by name, with options that replace the optimizer's settings.

    A parameter belongs to its first matching group.
    """

    targets: list[str] = setting("parameter name patterns (fnmatch)", check=find_targets_fault)
    lr_multiplier: float = setting("learning-rate multiplier", default=1.0, check=at_least(0))
    weight_decay: float | None = setting(
        "the group's weight decay coefficient, for norms and biases, too", default=None, check=at_least(0)
    )

    def options(self) -> dict[str, Any]:
        """Return the explicit options, by their names in torch's parameter groups."""
        options = attrs.asdict(self, recurse=False)
        return {name: value for name, value in options.items() if name != "targets" and value is not None}


@attrs.frozen(kw_only=True)
class AdamGroup(ParameterGroup):
    """Parameter group for an optimizer with Adam's two running means."""

    betas: tuple[float, float] | None = setting(
        "decay rates for the two running means", default=None, check=find_betas_fault
    )


def find_unsupported_parametrization(node: NodeView) -> Iterator[Problem]:
    """Yield a problem for an optimizer without a parametrization's scaling whose model has a parametrization."""
    stages = node.neighbour("parameters")
    model = stages and stages.neighbour("model")
    if model and model.neighbours("parametrization"):
        text = f"{node.use} has no learning rates for [{model.name}], which has a parametrization"
        remedy = "write optim.adamw, optim.stochastic_adamw or optim.muon, or remove the parametrization"
        yield node.problem("use", text, remedy)


def warn_unmatched_patterns(node: NodeView) -> Iterator[Problem]:
    """
    Yield a warning for every pattern, in groups or the optimizer's `targets`, without a model parameter.

    Only models with `build_meta_module_if_known` are checked, because adapters, features and a `TrainableLoss` change
    the parameters when the run starts. `targets` select matrices only.
    """
    groups, own_targets = node.settings["groups"], node.settings.get("targets")
    kinds: list[tuple[ParameterKind, dict[str, list[str]], list[KeyPath]]] = [
        (
            "parameter",
            list_patterns_by_group(groups),
            [("groups", number, "targets") for number in range(len(groups))],
        ),
        ("matrix", {} if own_targets is None else {"targets": own_targets}, [("targets",)]),
    ]
    stages = node.neighbour("parameters") if any(targets for _, targets, _ in kinds) else None
    roles = _find_model_parameter_roles(stages) if stages else {}
    for kind, targets, paths in kinds:
        names = [name for name, role in roles.items() if kind == "parameter" or role.is_matrix]
        for index, pattern, text in find_pattern_faults(pair_with_group_index(names, targets), targets, kind):
            yield node.warning(paths[index], f"the pattern {pattern!r} {text}")


def _find_model_parameter_roles(stages: NodeView) -> dict[str, Role]:
    """Return the roles of the stages' model parameters; {} if another part of the stages changes parameters."""
    model, loss = stages.neighbour("model"), stages.neighbour("loss")
    trains_loss = loss and loss.implements(TrainableLoss)
    if model is None or trains_loss or stages.neighbours("adapters") or stages.neighbours("features"):
        return {}
    module = build_meta_module_if_known(model)
    return {} if module is None else dict(parameter_roles(module))


def list_patterns_by_group(groups: Sequence[ParameterGroup]) -> dict[str, list[str]]:
    """Return the groups' patterns by the setting's name, such as `groups[0]`."""
    return {f"groups[{number}]": group.targets for number, group in enumerate(groups)}


def pair_with_group_index(names: Sequence[str], targets: Mapping[str, Sequence[str]]) -> list[tuple[str, int]]:
    """Pair every name with the 1-based index of its first matching group, or with 0."""
    numbered = [(number, pattern) for number, patterns in enumerate(targets.values(), 1) for pattern in patterns]
    return [(name, next((number for number, pattern in numbered if fnmatchcase(name, pattern)), 0)) for name in names]


class _PatternFault(NamedTuple):
    """Fault in a group's pattern; the group's index counts from 0."""

    group_index: int
    pattern: str
    fault: str


def find_pattern_faults(
    pairs: Sequence[tuple[str, int]], targets: Mapping[str, Sequence[str]], kind: ParameterKind
) -> Iterator[_PatternFault]:
    """Yield a fault for patterns without a match, or only in other groups."""
    # A model without trained parameters is not a fault of the patterns.
    if not pairs:
        return
    for number, (setting_name, patterns) in enumerate(targets.items()):
        for pattern in patterns:
            matched = [(name, index) for name, index in pairs if fnmatchcase(name, pattern)]
            if not matched:
                # The example comes from the middle, which is a layer: most patterns are for layers.
                yield _PatternFault(
                    number, pattern, f"matches no trained {kind}; one is called {pairs[len(pairs) // 2][0]!r}"
                )
            elif all(index != number + 1 for _, index in matched):
                name, index = matched[0]
                text = f"matches {name!r}, but that is in {[*targets][index - 1]}; write {setting_name} before it"
                yield _PatternFault(number, pattern, text)
