"""What `check` says of stages with their neighbours: dtypes, weights and models that do not fit a mesh."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from drawloom.components.ports.distributed import SHARDS
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.graph import Problem, UserError
from drawloom.graph.build.node import NodeView


def misfits_of_shards(mesh: NodeView, precision: NodeView) -> Iterator[Problem]:
    """Dtypes that sharded parameters can't have: FSDP keeps the slices of gradients in the dtype of parameters."""
    kept, summed = precision.settings["parameter"], precision.settings["gradient"]
    if any(mesh.settings.get(name, 1) > 1 for name in SHARDS) and summed is not None and summed != kept:
        text = f"gradients of sharded parameters are kept in the parameters' dtype, {kept!r}, and not in {summed!r}"
        yield precision.problem("gradient", text, f"write parameter = {summed!r}, or leave gradient out")


def roundings(stages: NodeView, model: NodeView, precision: NodeView) -> Iterator[Problem]:
    """A warning of weights that are wider than the parameters that they become."""
    named = model.settings.get("path") if model.settings.get("weights") else None
    folder: Path | None = stages.settings["weights"] or named
    kept = getattr(torch, str(precision.settings["parameter"]))
    found: set[torch.dtype] = set()
    if folder is not None:
        with suppress(UserError):  # a problem of its own
            found = {spec.dtype for spec in open_safetensors_folder(folder).specs().values()}
    if wider := sorted(str(each).removeprefix("torch.") for each in found if torch.promote_types(each, kept) != kept):
        text = f"the weights in {folder} are {wider[0]}, and are rounded to {precision.settings['parameter']}"
        yield precision.warning("parameter", text, f'write parameter = "{wider[0]}" to keep them')


NO_DISPATCHER = "ranks along 'expert' share the experts out, and nothing brings tokens to the experts of other ranks"
WRITE_DISPATCHER = 'write dispatcher = { use = "experts.all_to_all" } in [stages]'


def misfits_of_experts(stages: NodeView, mesh: NodeView, model: NodeView) -> Iterator[Problem]:
    """Models that have no experts for the ranks along `expert`; a model counts them by a classmethod `expert_count`."""
    ranks, count = mesh.settings.get("expert", 1), getattr(model.component, "expert_count", None)
    if ranks == 1 or count is None:
        return
    if not (experts := count(model)):
        yield mesh.problem("expert", f"{ranks} ranks along 'expert', and [{model.name}] has no experts", "write 1")
    elif experts % ranks:
        text = f"{ranks} ranks along 'expert' can't share the {experts} experts of [{model.name}] evenly"
        yield mesh.problem("expert", text, "write another number, or 1")
    elif not any(getattr(each.component, "between_ranks", False) for each in stages.neighbours("dispatcher")):
        yield mesh.problem("expert", NO_DISPATCHER, WRITE_DISPATCHER.replace("[stages]", f"[{stages.name}]"))


def misfits_of_tensor(mesh: NodeView, model: NodeView) -> Iterator[Problem]:
    """Models that ranks along `tensor` can't share evenly; a model says so by a classmethod `tensor_faults`."""
    ranks, faults = mesh.settings.get("tensor", 1), getattr(model.component, "tensor_faults", None)
    if ranks > 1 and faults is not None:
        for fault in faults(model, ranks):
            text = f"{ranks} ranks along 'tensor' share every matrix product of [{model.name}], and {fault}"
            yield mesh.problem("tensor", text, "write another number, or 1")
