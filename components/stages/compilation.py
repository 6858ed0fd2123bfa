"""Blocks that are compiled one by one, and what `check` says of stages whose backward passes can't be split."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from drawloom.components.parallel.expert import ExpertParallel
from drawloom.components.parallel.pipeline import build_schedule
from drawloom.components.pipeline.program.lowering import program_for
from drawloom.components.ports.distributed import PerDimension
from drawloom.components.ports.program import BACKWARD_INPUT
from drawloom.components.ports.stages import fuses_backward
from drawloom.graph import Problem, UserError
from drawloom.graph.wiring.node import NodeView


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile the forward of each block when it first runs; blocks of one kind share the result."""
    for block in blocks:
        for part in block.modules():
            # How many tokens other ranks send is known at run time only.
            if isinstance(part, ExpertParallel) and part.dispatcher is not None:
                part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]
        # Not the call: hooks, such as those that gather parameters, are no part of what is compiled.
        block.forward = torch.compile(block.forward)


def undivided_backwards(stages: NodeView, schedule: NodeView, mesh: NodeView) -> Iterator[Problem]:
    """Warnings of weight gradients that a schedule puts off, but that come with those of the inputs."""
    if not _splits(schedule, mesh):
        return
    why = f"so that W has nothing left to do where [{schedule.name}] puts it into the bubble"
    other = f"or take a schedule without W in [{schedule.name}], such as pipeline.schedules.one_f_one_b"
    if stages.settings["compile"]:
        text = f"a compiled block computes the gradients of its weights with that of its input, {why}"
        yield stages.warning("compile", text, f"write compile = false, {other}")
    for part in (*stages.neighbours("model"), *stages.neighbours("transforms")):
        if fuses_backward(part.component):
            text = f"{part.use!r} computes the gradients of weights with those of inputs, as it says, {why}"
            yield part.warning("use", text, f"write recompute or compile in [{stages.name}] in its place, {other}")


def idle_policies(stages: NodeView) -> Iterator[Problem]:
    """Warnings of policies of recomputation that compiled blocks do not follow."""
    if not stages.settings["compile"]:
        return
    text = "torch chooses what compiled blocks recompute, so that 'selective' is for what is outside of them"
    if stages.settings["recompute"] == "selective":
        yield stages.warning("recompute", text, 'write recompute = "blocks" or "none", or compile = false')
    for schedule in stages.neighbours("schedule"):
        if "selective" in (schedule.settings.get("recompute") or ()):
            hint = f"leave recompute.selective out, or write compile = false in [{stages.name}]"
            yield schedule.warning("recompute", text, hint)


def _splits(schedule: NodeView, mesh: NodeView) -> bool:
    """Whether a schedule takes stages backward in two parts; False if it has problems of its own."""
    built, ranks = build_schedule(schedule), PerDimension.of_settings(mesh.settings).pipeline
    try:
        # In a schedule that knows ranks alone, all of them split or none.
        program = None if built is None else program_for(built, 0, ranks, 2 * ranks)
    except UserError:
        return False
    return program is not None and bool((program.op == BACKWARD_INPUT).any())
