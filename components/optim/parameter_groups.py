"""Parameter groups: parameters with their own optimizer options."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import attrs

from drawloom import NodeView, Problem, UserError, at_least, between, setting
from drawloom.graph.problems import KeyPath
from drawloom.ports import (
    UNSCALED,
    Mesh,
    Parameters,
    Role,
    Scaling,
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


def create_param_groups(
    parameters: Parameters, groups: Sequence[ParameterGroup], weight_decay: float, mesh: Mesh, eps: float = 1.0
) -> list[dict[str, Any]]:
    """
    Return torch's parameter groups: `params`, `weight_decay`, `lr_multiplier`, `width`, and explicit options.

    A role's scaling multiplies `lr_multiplier` and `eps`, which is an option only if it is scaled, and divides
    `weight_decay`, so lr * weight_decay stays the same. `width` is the scaling's width ratio.

    Every trained parameter is in one group. Parameters without a group, and then every group's parameters, form two
    torch groups, or more if roles are scaled: matrices, and parameters of other roles, without weight decay. Groups may
    be empty: torch rejects an empty group list, but all parameters on a pipeline rank may be frozen. Raises UserError,
    on all ranks, for a pattern without a matching parameter.
    """
    named, roles = parameters.named_parameters(), parameters.roles()
    indices = agree_on_group_indices([name for name, _ in named], _list_patterns_by_group(groups), mesh)
    torch_groups: list[dict[str, Any]] = []
    for number, group in enumerate([None, *groups]):
        members = [pair for pair, index in zip(named, indices, strict=True) if index == number]
        options = {"lr_multiplier": 1.0} if group is None else group.options()
        for is_matrix, decay in ((True, weight_decay), (False, 0.0)):
            chosen = [(part, roles[name].scaling) for name, part in members if roles[name].is_matrix == is_matrix]
            for scaling in dict.fromkeys(scaling for _, scaling in chosen) or (UNSCALED,):
                params = [part for part, part_scaling in chosen if part_scaling == scaling]
                scaled = _scale_options({"weight_decay": decay} | options, scaling, eps)
                torch_groups.append({"params": params} | scaled)
    return torch_groups


def _scale_options(options: dict[str, Any], scaling: Scaling, eps: float) -> dict[str, Any]:
    """Multiply a parameter group's options by a role's scaling, and add `eps` if it is scaled."""
    return {
        **options,
        "lr_multiplier": options["lr_multiplier"] * scaling.lr,
        "weight_decay": options["weight_decay"] / scaling.lr,
        "width": scaling.width_ratio,
        **({"eps": eps * scaling.eps} if scaling.eps != 1 else {}),
    }


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
            _list_patterns_by_group(groups),
            [("groups", number, "targets") for number in range(len(groups))],
        ),
        ("matrix", {} if own_targets is None else {"targets": own_targets}, [("targets",)]),
    ]
    stages = node.neighbour("parameters") if any(targets for _, targets, _ in kinds) else None
    roles = _find_model_parameter_roles(stages) if stages else {}
    for kind, targets, paths in kinds:
        names = [name for name, role in roles.items() if kind == "parameter" or role.is_matrix]
        for index, pattern, text in _find_pattern_faults(_pair_with_group_index(names, targets), targets, kind):
            yield node.warning(paths[index], f"the pattern {pattern!r} {text}")


def _find_model_parameter_roles(stages: NodeView) -> dict[str, Role]:
    """Return the roles of the stages' model parameters; {} if another part of the stages changes parameters."""
    model, loss = stages.neighbour("model"), stages.neighbour("loss")
    trains_loss = loss and loss.implements(TrainableLoss)
    if model is None or trains_loss or stages.neighbours("adapters") or stages.neighbours("features"):
        return {}
    module = build_meta_module_if_known(model)
    return {} if module is None else dict(parameter_roles(module))


def _list_patterns_by_group(groups: Sequence[ParameterGroup]) -> dict[str, list[str]]:
    return {f"groups[{number}]": group.targets for number, group in enumerate(groups)}


def agree_on_group_indices(
    names: Sequence[str], targets: Mapping[str, Sequence[str]], mesh: Mesh, kind: ParameterKind = "parameter"
) -> list[int]:
    """
    Return by parameter name the 1-based index of the first matching group, or 0.

    `targets` maps the group setting's name to its patterns; all names belong to `kind` parameters. Raises UserError, on
    all ranks, for a pattern without a parameter on any rank.
    """
    pairs = _pair_with_group_index(names, targets)
    # Most runs have no patterns and need no collective.
    if targets:
        pairs_by_rank = mesh.pipeline_group.gather_json(pairs)
        all_pairs = [(str(name), int(index)) for rank_pairs in pairs_by_rank for name, index in rank_pairs]
        for number, pattern, text in _find_pattern_faults(all_pairs, targets, kind):
            raise UserError(f"{[*targets][number]} of the optimizer: the pattern {pattern!r} {text}", exit_code=2)
    return [index for _, index in pairs]


def _pair_with_group_index(names: Sequence[str], targets: Mapping[str, Sequence[str]]) -> list[tuple[str, int]]:
    """Pair every name with the 1-based index of its first matching group, or with 0."""
    numbered = [(number, pattern) for number, patterns in enumerate(targets.values(), 1) for pattern in patterns]
    return [(name, next((number for number, pattern in numbered if fnmatchcase(name, pattern)), 0)) for name in names]


class _PatternFault(NamedTuple):
    """Fault in a group's pattern; the group's index counts from 0."""

    group_index: int
    pattern: str
    fault: str


def _find_pattern_faults(
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
