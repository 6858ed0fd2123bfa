"""What `check` and `explain` say of stages with their neighbours: what does not fit a mesh, and what ranks share."""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from drawloom.components.parallel.pipeline import build_schedule
from drawloom.components.pipeline.program.recomputation import text_of
from drawloom.components.ports.distributed import SHARDS
from drawloom.components.ports.experts import supports_expert_parallel
from drawloom.components.ports.model import ExpertModel, TensorParallelModel
from drawloom.components.ports.pipeline import OuterLayersSchedule, PartitioningSchedule, embeds_on_every_rank
from drawloom.components.ports.stages import Recompute
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.graph import Problem, UserError
from drawloom.graph.wiring.node import NodeView


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
    """Models that have no experts for the ranks along `expert`; an `ExpertModel` counts them."""
    ranks = mesh.settings.get("expert", 1)
    if ranks == 1 or not issubclass(model.component, ExpertModel):
        return
    if not (experts := model.component.expert_count(model)):
        yield mesh.problem("expert", f"{ranks} ranks along 'expert', and [{model.name}] has no experts", "write 1")
    elif experts % ranks:
        text = f"{ranks} ranks along 'expert' can't share the {experts} experts of [{model.name}] evenly"
        yield mesh.problem("expert", text, "write another number, or 1")
    elif not any(supports_expert_parallel(each.component) for each in stages.neighbours("dispatcher")):
        yield mesh.problem("expert", NO_DISPATCHER, WRITE_DISPATCHER.replace("[stages]", f"[{stages.name}]"))


def misfits_of_tensor(mesh: NodeView, model: NodeView) -> Iterator[Problem]:
    """Models that ranks along `tensor` can't share evenly; a `TensorParallelModel` says so."""
    ranks = mesh.settings.get("tensor", 1)
    if ranks > 1 and issubclass(model.component, TensorParallelModel):
        for fault in model.component.tensor_faults(model, ranks):
            text = f"{ranks} ranks along 'tensor' share every matrix product of [{model.name}], and {fault}"
            yield mesh.problem("tensor", text, "write another number, or 1")


def misfits_of_capture(stages: NodeView) -> Iterator[Problem]:
    """Meshes and adapters whose passes are not the same launches in each step."""
    if not stages.settings["capture"]:
        return
    for mesh in stages.neighbours("mesh"):
        if wide := [name for name in ("data_shard", "context", "tensor", "expert") if mesh.settings.get(name, 1) > 1]:
            text = f"passes with collectives of ranks along {wide[0]!r} can't be captured as CUDA graphs"
            yield stages.problem("capture", text, f"write capture = false, or {wide[0]} = 1 in [{mesh.name}]")
    for adapter in stages.neighbours("adapters"):
        if adapter.settings.get("dropout"):
            text = f"the dropout of [{adapter.name}] draws other numbers in each pass, and a CUDA graph does the same"
            yield stages.problem("capture", text, f"write capture = false, or dropout = 0.0 in [{adapter.name}]")


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
            sizes = built.layers_by_stage(mesh.settings.get("pipeline", 1), layers)
            yield f"layers of stages, by [{schedule.name}]: {', '.join(map(str, sizes))}"
    if isinstance(built, OuterLayersSchedule) and isinstance(layers, int):
        with suppress(UserError):  # a problem of its own
            inside = built.layers_in_stages(mesh.settings.get("pipeline", 1), layers)
            if inside < layers:
                yield f"layers {inside} to {layers - 1}: on every pipeline rank, for its share of the microbatches"
    if again := text_of(_policies(schedule, mesh)):
        yield f"recomputed, by [{schedule.name}] if a step has {_microbatches(schedule, mesh)} microbatches: {again}"


def _microbatches(schedule: NodeView, mesh: NodeView) -> int:
    return schedule.settings.get("microbatches") or 4 * int(mesh.settings.get("pipeline", 1))


def _policies(schedule: NodeView, mesh: NodeView) -> tuple[Recompute, ...]:
    """What each stage recomputes by the schedule's program; none if that has no policies, or a problem of its own."""
    built = build_schedule(schedule)
    with suppress(UserError, ValueError):
        if built is not None:
            return built.program(mesh.settings.get("pipeline", 1), _microbatches(schedule, mesh)).recompute
    return ()


def losses_that_are_modules(stages: NodeView, loss: NodeView) -> Iterator[Problem]:
    """A loss that is a module itself: its parameters belong to the stages."""
    if issubclass(loss.component, nn.Module):
        where = f"under [{loss.name}] and [{stages.name}]"
        text = f"{loss.use!r} is an nn.Module, which a checkpoint would save {where}"
        yield loss.problem("use", text, "let the component hold an nn.Module as its attribute `module`")


def shares_of_parameters(stages: NodeView, mesh: NodeView) -> Iterator[str]:
    """How the ranks of a mesh share the parameters, for `explain`."""
    size = {name: mesh.settings.get(name, 1) for name in ("pipeline", *SHARDS, "tensor", "expert")}
    if size["pipeline"] > 1:
        yield f"layers: partitioned over {size['pipeline']} pipeline ranks"
    if size["tensor"] > 1:
        yield f"linear layers, embedding and head: split over {size['tensor']} ranks, and tokens in between"
    if (ranks := math.prod(size[name] for name in SHARDS)) > 1:
        by_block = gathers_by_block(stages.settings["reshard_after_forward"], size["pipeline"])
        often = "by layer" if by_block else "once a step"
        yield f"parameters, gradients and moments: sharded over {ranks} ranks; weights are gathered {often}"
    if size["expert"] > 1:
        replica = ranks * size["tensor"]
        rest = replica // math.gcd(replica, size["expert"])
        further = f", and sharded over {rest}" if rest > 1 and ranks > 1 else ""
        yield f"experts: shared out over {size['expert']} ranks{further}"


def gathers_by_block(setting: bool | None, pipeline: int) -> bool:
    """Whether each layer is gathered when it is used, with that many pipeline ranks."""
    # Each microbatch of a pipeline would gather each block anew, so that a stage is gathered once a step there.
    return pipeline == 1 if setting is None else setting


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
