"""Checks for stages: conflicts with the mesh, and the ranks' shared work."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from drawloom import NodeView, Problem, UserError
from drawloom.components.parallel.pipeline import build_schedule_or_none
from drawloom.components.pipeline.program.builders import build_program_with_neighbours
from drawloom.ports import (
    BACKWARD_INPUT,
    Adapter,
    Loss,
    Model,
    PartitioningSchedule,
    PerDimension,
    PretrainedModel,
    Program,
    Recompute,
    Scorer,
    StageNodes,
    check_exclusions,
    computes_both_gradients_at_once,
    embeds_on_every_rank,
)


def find_stage_nodes(stages: NodeView) -> StageNodes | None:
    """Return the nodes for checks of parallelism; None for a recipe without a mesh."""
    mesh = stages.neighbour("mesh")
    if mesh is None:
        return None
    return StageNodes(
        stages=stages, mesh=mesh, model=stages.neighbour("model"), precision=stages.neighbour("precision")
    )


def check_features(nodes: StageNodes) -> Iterator[Problem]:
    """Yield the features' problems with the stages, and with nodes that they exclude."""
    for feature in nodes.features:
        yield from nodes.component_of(feature).check_stages(feature, nodes)
        yield from check_exclusions(feature)


def find_initial_folder(weights: Path | None, model: Model) -> Path | None:
    """Return the initial weights' folder: the recipe's, or the model's own; None for random weights."""
    return weights or (model.initial_weights if isinstance(model, PretrainedModel) else None)


def check_initial_folder(weights: Path | None, model: Model, loss: Loss | None) -> None:
    """Raise UserError if `weights` can't be read, or if the initial weights lack the loss's head."""
    folder = find_initial_folder(weights, model)
    if folder is None:
        return
    # imported here: few recipes name a folder
    from drawloom.components.storage.safetensors.reader import open_safetensors_folder
    from drawloom.components.weights.heads import check_language_model_head

    try:
        if weights is not None:
            open_safetensors_folder(weights)
        if not isinstance(loss, Scorer):
            check_language_model_head(folder)
    except UserError as error:
        raise UserError(f"weights: {error}") from error


def check_adapter_folder(adapter: Path, model: Model, adapters: Sequence[Adapter], weights: Path | None) -> None:
    """Raise UserError if an adapter's folder can't be read, or does not fit the adapters and the base model."""
    # imported here: few recipes name an adapter
    from drawloom.components.weights.adapter_folder import AdapterFolder

    try:
        AdapterFolder.read(adapter).check(model, adapters, find_initial_folder(weights, model))
    except UserError as error:
        raise UserError(f"adapter_weights: {error}", error.exit_code) from error


def check_adapter_weights_have_adapters(stages: NodeView) -> Iterator[Problem]:
    """Yield a problem for weights of adapters without adapters."""
    if stages.settings["adapter_weights"] is not None and not stages.neighbours("adapters"):
        text = "there are no adapters to fill"
        yield stages.problem("adapter_weights", text, 'write adapters = ["@lora"] and a table [lora], or leave it out')


def warn_narrowed_weights(stages: NodeView) -> Iterator[Problem]:
    """Warn about initial weights in a wider dtype than `precision.parameter`, to which they are rounded."""
    model, precision = stages.neighbour("model"), stages.neighbour("precision")
    if model is None or precision is None:
        return
    model_folder = model.settings.get("path") if model.settings.get("weights") else None
    folder: Path | None = stages.settings["weights"] or model_folder
    parameter_dtype = getattr(torch, str(precision.settings["parameter"]))
    weight_dtypes: set[torch.dtype] = set()
    if folder is not None:
        from drawloom.components.storage.safetensors.reader import open_safetensors_folder

        with suppress(UserError):  # reported elsewhere
            weight_dtypes = {spec.dtype for spec in open_safetensors_folder(folder).specs().values()}
    wider_dtypes = {dtype for dtype in weight_dtypes if torch.promote_types(dtype, parameter_dtype) != parameter_dtype}
    if wider := sorted(str(dtype).removeprefix("torch.") for dtype in wider_dtypes):
        text = f"the weights in {folder} are {wider[0]}, and are rounded to {precision.settings['parameter']}"
        yield precision.warning("parameter", text, f'write parameter = "{wider[0]}" to keep them')


def check_memory_policy(stages: NodeView, schedule: NodeView) -> Iterator[Problem]:
    """Yield problems for settings of stages and schedule in a memory policy's domain."""
    if (policy := stages.neighbour("memory")) is None:
        return
    if stages.settings["recompute"] != "none":
        text = f"[{policy.name}] chooses what is kept, recomputed and offloaded"
        yield stages.problem("recompute", text, f"remove it, or [{policy.name}]")
    for key in ("recompute", "offload"):
        if schedule.settings.get(key):
            text = f"[{policy.name}] chooses what stages recompute and offload"
            yield schedule.problem(key, text, f"remove it, or [{policy.name}]")


def check_layer_costs_are_used(stages: NodeView, schedule: NodeView) -> Iterator[Problem]:
    """Yield problems for embedding and head costs if the schedule ignores them."""
    for key in ("embedding_layer_cost", "head_layer_cost"):
        if stages.settings[key] and embeds_on_every_rank(schedule.component):
            text = f"[{schedule.name}] places embedding and head on every rank, so the cost moves no layers"
            yield stages.problem(key, text, f"write {key} = 0")
        elif stages.settings[key] and issubclass(schedule.component, PartitioningSchedule):
            text = f"[{schedule.name}] partitions the layers by its own layer costs"
            yield stages.problem(key, text, f"write {key} = 0, and the costs in [{schedule.name}]")


def check_recompute_is_set_once(stages: NodeView, schedule: NodeView, mesh: NodeView) -> Iterator[Problem]:
    """Yield a problem for a recompute policy if the schedule also has a policy by stage."""
    if stages.settings["recompute"] == "none":
        return
    program = build_program_or_none(schedule, mesh)
    if schedule.settings.get("recompute") or (program and program.recompute):
        text = f"[{schedule.name}] sets recompute policies by stage"
        yield stages.problem("recompute", text, f'write recompute = "none", or leave it out in [{schedule.name}]')


def build_program_or_none(schedule: NodeView, mesh: NodeView) -> Program | None:
    """Return the program for the schedule's microbatches, or 4 per rank; None if the schedule has problems."""
    built = build_schedule_or_none(schedule)
    with suppress(UserError, ValueError):
        if built is not None:
            ranks = PerDimension.from_settings(mesh.settings).pipeline
            return built.program(ranks, schedule.settings.get("microbatches") or 4 * ranks)
    return None


def check_loss_is_not_module(stages: NodeView, loss: NodeView) -> Iterator[Problem]:
    """Yield a problem for a loss that is an nn.Module itself: the stages must own its parameters."""
    if issubclass(loss.component, nn.Module):
        where = f"under [{loss.name}] and [{stages.name}]"
        text = f"{loss.use!r} is an nn.Module, which a checkpoint would save twice, {where}"
        yield loss.problem("use", text, "let the component hold an nn.Module as its attribute `module`")


def describe_recompute_fault(policy: Recompute) -> str | None:
    """Return the fault in a numeric recompute policy below 1, else None."""
    return f"{policy} is not above 0" if isinstance(policy, int) and policy < 1 else None


def warn_fused_split_backward(stages: NodeView, schedule: NodeView, mesh: NodeView) -> Iterator[Problem]:
    """Warn if the schedule delays weight gradients, but model or features compute them with input gradients."""
    if not _splits_backward(schedule, mesh):
        return
    effect = f"so W, which [{schedule.name}] schedules in the bubble, has nothing to compute"
    alternative = f"or use a schedule without W in [{schedule.name}], such as pipeline.schedules.one_f_one_b"
    for part in (*stages.neighbours("model"), *stages.neighbours("features")):
        if computes_both_gradients_at_once(part.component):
            text = f"{part.use!r} computes weight gradients together with input gradients, {effect}"
            yield part.warning("use", text, f"use another component in [{part.name}], {alternative}")


def _splits_backward(schedule: NodeView, mesh: NodeView) -> bool:
    """Return whether a schedule splits stages' backward passes; False if the schedule has problems."""
    built, ranks = build_schedule_or_none(schedule), PerDimension.from_settings(mesh.settings).pipeline
    try:
        # Rank 0 is enough: in a schedule that computes ranks separately, all ranks split or none.
        program = None if built is None else build_program_with_neighbours(built, 0, ranks, 2 * ranks)
    except UserError:
        return False
    return program is not None and bool((program.op == BACKWARD_INPUT).any())
