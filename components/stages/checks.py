"""What `check` and `explain` say of stages with their neighbours: what does not fit a mesh, and what ranks share."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from drawloom.components.parallel.dimension import StageNodes
from drawloom.components.parallel.dimensions import DIMENSIONS
from drawloom.components.parallel.pipeline import build_schedule
from drawloom.components.pipeline.program.recomputation import text_of
from drawloom.components.ports.distributed import PerDimension
from drawloom.components.ports.pipeline import OuterLayersSchedule, PartitioningSchedule, embeds_on_every_rank
from drawloom.components.ports.stages import Recompute
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.graph import Problem, UserError
from drawloom.graph.wiring.node import NodeView


def stage_nodes(stages: NodeView) -> StageNodes | None:
    """Return the nodes that decide how stages are shared; None for a recipe without a mesh."""
    mesh = stages.neighbour("mesh")
    if mesh is None:
        return None
    return StageNodes(
        stages=stages, mesh=mesh, model=stages.neighbour("model"), precision=stages.neighbour("precision")
    )


def roundings(stages: NodeView) -> Iterator[Problem]:
    """Warn of weights that are wider than the parameters that they become."""
    model, precision = stages.neighbour("model"), stages.neighbour("precision")
    if model is None or precision is None:
        return
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


def misfits_of_capture(nodes: StageNodes) -> Iterator[Problem]:
    """Yield meshes and adapters whose passes are not the same launches in each step."""
    if not nodes.stages.settings["capture"]:
        return
    sizes = nodes.sizes.settings()
    if name := next((kind.name for kind in DIMENSIONS if not kind.can_capture and sizes[kind.name] > 1), None):
        text = f"passes with collectives of ranks along {name!r} can't be captured as CUDA graphs"
        yield nodes.stages.problem("capture", text, f"write capture = false, or {name} = 1 in [{nodes.mesh.name}]")
    for adapter in nodes.stages.neighbours("adapters"):
        if adapter.settings.get("dropout"):
            text = f"the dropout of [{adapter.name}] draws other numbers in each pass, and a CUDA graph does the same"
            hint = f"write capture = false, or dropout = 0.0 in [{adapter.name}]"
            yield nodes.stages.problem("capture", text, hint)


def costs_of_ends(stages: NodeView, schedule: NodeView) -> Iterator[Problem]:
    """Costs of embedding and head in layers, where no stage has them instead of layers, or the schedule has them."""
    for key in ("embedding_layer_cost", "head_layer_cost"):
        if stages.settings[key] and embeds_on_every_rank(schedule.component):
            text = f"with [{schedule.name}] each rank has embedding and head, and none has fewer layers for them"
            yield stages.problem(key, text, f"write {key} = 0")
        elif stages.settings[key] and issubclass(schedule.component, PartitioningSchedule):
            text = f"[{schedule.name}] says how many layers each stage has, by its own costs of them"
            yield stages.problem(key, text, f"write {key} = 0, and the costs in [{schedule.name}]")


def policies_of_schedule(stages: NodeView, schedule: NodeView, mesh: NodeView) -> Iterator[Problem]:
    """A policy of recomputation where the schedule has one for each stage."""
    if stages.settings["recompute"] != "none" and (schedule.settings.get("recompute") or _policies(schedule, mesh)):
        text = f"[{schedule.name}] says what each stage recomputes"
        yield stages.problem("recompute", text, f'write recompute = "none", or leave it out in [{schedule.name}]')


def layers_of_stages(schedule: NodeView, mesh: NodeView, model: NodeView) -> Iterator[str]:
    """How many layers each stage has and what it recomputes, for `explain`, if the schedule says so."""
    built, layers = build_schedule(schedule), model.settings.get("num_hidden_layers")
    if isinstance(built, PartitioningSchedule) and isinstance(layers, int):
        with suppress(UserError):  # a problem of its own
            sizes = built.layers_by_stage(PerDimension.of_settings(mesh.settings).pipeline, layers)
            yield f"layers of stages, by [{schedule.name}]: {', '.join(map(str, sizes))}"
    if isinstance(built, OuterLayersSchedule) and isinstance(layers, int):
        with suppress(UserError):  # a problem of its own
            inside = built.layers_in_stages(PerDimension.of_settings(mesh.settings).pipeline, layers)
            if inside < layers:
                yield f"layers {inside} to {layers - 1}: on every pipeline rank, for its share of the microbatches"
    if again := text_of(_policies(schedule, mesh)):
        yield f"recomputed, by [{schedule.name}] if a step has {_microbatches(schedule, mesh)} microbatches: {again}"


def _microbatches(schedule: NodeView, mesh: NodeView) -> int:
    return schedule.settings.get("microbatches") or 4 * PerDimension.of_settings(mesh.settings).pipeline


def _policies(schedule: NodeView, mesh: NodeView) -> tuple[Recompute, ...]:
    """What each stage recomputes by the schedule's program; none if that has no policies, or a problem of its own."""
    built = build_schedule(schedule)
    with suppress(UserError, ValueError):
        if built is not None:
            return built.program(
                PerDimension.of_settings(mesh.settings).pipeline, _microbatches(schedule, mesh)
            ).recompute
    return ()


def losses_that_are_modules(stages: NodeView, loss: NodeView) -> Iterator[Problem]:
    """A loss that is a module itself: its parameters belong to the stages."""
    if issubclass(loss.component, nn.Module):
        where = f"under [{loss.name}] and [{stages.name}]"
        text = f"{loss.use!r} is an nn.Module, which a checkpoint would save {where}"
        yield loss.problem("use", text, "let the component hold an nn.Module as its attribute `module`")


def fault_of_policy(policy: Recompute) -> str | None:
    """What is wrong with a policy, if it is a number."""
    return f"{policy} is not above 0" if isinstance(policy, int) and policy < 1 else None


def notes_of_policy(policy: Recompute) -> Iterator[str]:
    """What a policy keeps of a microbatch, and what it costs."""
    if policy == "selective":
        yield "recompute: norms, gates and rotations run again in the backward pass; their results are not kept"
    elif policy != "none":
        which = "each block" if policy in ("blocks", 1) else f"one of {policy} blocks"
        yield f"recompute: of {which} only the input is kept, and its forward runs again in the backward pass"
