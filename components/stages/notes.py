"""Notes on stages, for `explain`: recomputation, features, mesh dimensions, and the partition of layers."""

from collections.abc import Iterator
from contextlib import suppress

from drawloom import NodeView, UserError
from drawloom.components.parallel.dimensions import DIMENSIONS
from drawloom.components.parallel.pipeline import build_schedule_or_none
from drawloom.components.stages.checks import build_program_or_none, find_stage_nodes
from drawloom.ports import OuterLayersSchedule, PartitioningSchedule, PerDimension, Recompute, StageNodes


def describe_stages(node: NodeView) -> Iterator[str]:
    """Yield sentences about the stages' node."""
    yield from describe_recompute_policy(node.settings["recompute"])
    if nodes := find_stage_nodes(node):
        yield from describe_features(nodes)
        for dimension in DIMENSIONS:
            yield from dimension.notes(nodes)
        schedule = node.neighbour("schedule")
        if schedule and nodes.model:
            yield from _describe_chosen_layer_partition(schedule, nodes.mesh, nodes.model)


def describe_features(nodes: StageNodes) -> Iterator[str]:
    """Yield the features' sentences for `explain`."""
    for feature in nodes.features:
        yield from nodes.component_of(feature).describe_stages(feature, nodes)


def describe_recompute_policy(policy: Recompute) -> Iterator[str]:
    """Yield a sentence about a recompute policy's kept activations and its cost (activation checkpointing)."""
    if policy == "selective":
        yield "recompute: norms, gates and rotations run again in the backward pass; their results are not kept"
    elif policy == "quantized":
        yield "recompute: norms, gates and rotations run again in the backward pass; the results are not kept"
        yield "recompute: inputs of norms and gates are kept in 8 bits, which rounds gradients (lossy), but no loss"
    elif policy != "none":
        blocks = "each block" if policy in ("blocks", 1) else f"one of {policy} blocks"
        yield f"recompute: of {blocks} only the input is kept, and its forward runs again in the backward pass"


def _describe_chosen_layer_partition(schedule: NodeView, mesh: NodeView, model: NodeView) -> Iterator[str]:
    """Yield the schedule's own layer partition, its choice and its recompute policies."""
    built, layers = build_schedule_or_none(schedule), model.settings.get("num_hidden_layers")
    if isinstance(built, PartitioningSchedule) and isinstance(layers, int):
        with suppress(UserError):  # a problem of its own
            sizes = built.layers_by_stage(PerDimension.from_settings(mesh.settings).pipeline, layers)
            yield f"layers of stages, by [{schedule.name}]: {', '.join(map(str, sizes))}"
    if isinstance(built, OuterLayersSchedule) and isinstance(layers, int):
        with suppress(UserError):  # a problem of its own
            in_stages = built.get_pipelined_layer_count(PerDimension.from_settings(mesh.settings).pipeline, layers)
            if in_stages < layers:
                yield f"layers {in_stages} to {layers - 1}: on every pipeline rank, for its share of the microbatches"
    if program := build_program_or_none(schedule, mesh):
        count = f"if a step has {program.microbatches} microbatches"
        if program.choice:
            yield f"chosen by [{schedule.name}] {count}: {program.choice}"
        if program.recompute:
            from drawloom.components.pipeline.program.recomputation import describe_recompute_policies

            yield f"recomputed, by [{schedule.name}] {count}: {describe_recompute_policies(program.recompute)}"
