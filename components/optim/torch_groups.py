"""Parameter groups in torch's form, made when an optimizer opens."""

from collections.abc import Mapping, Sequence
from typing import Any

from drawloom import UserError
from drawloom.components.optim.parameter_groups import (
    ParameterGroup,
    ParameterKind,
    find_pattern_faults,
    list_patterns_by_group,
    pair_with_group_index,
)
from drawloom.ports import UNSCALED, Mesh, Parameters, Scaling


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
    indices = agree_on_group_indices([name for name, _ in named], list_patterns_by_group(groups), mesh)
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


def agree_on_group_indices(
    names: Sequence[str], targets: Mapping[str, Sequence[str]], mesh: Mesh, kind: ParameterKind = "parameter"
) -> list[int]:
    """
    Return by parameter name the 1-based index of the first matching group, or 0.

    `targets` maps the group setting's name to its patterns; all names belong to `kind` parameters. Raises UserError, on
    all ranks, for a pattern without a parameter on any rank.
    """
    pairs = pair_with_group_index(names, targets)
    # Most runs have no patterns and need no collective.
    if targets:
        pairs_by_rank = mesh.pipeline_group.gather_json(pairs)
        all_pairs = [(str(name), int(index)) for rank_pairs in pairs_by_rank for name, index in rank_pairs]
        for number, pattern, text in find_pattern_faults(all_pairs, targets, kind):
            raise UserError(f"{[*targets][number]} of the optimizer: the pattern {pattern!r} {text}", exit_code=2)
    return [index for _, index in pairs]
