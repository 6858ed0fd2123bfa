"""torch.compile for blocks, one by one, and checks for combinations with compiled blocks."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from drawloom.components.parallel.expert import ExpertParallel
from drawloom.components.parallel.pipeline import build_schedule_or_none
from drawloom.components.pipeline.program.lowering import build_program_of_rank_and_neighbours
from drawloom.components.ports.distributed import PerDimension
from drawloom.components.ports.program import BACKWARD_INPUT
from drawloom.components.ports.stages import computes_both_gradients_at_once
from drawloom.graph import Problem, UserError
from drawloom.graph.wiring.node import NodeView


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile every block's forward when it first runs; blocks of one kind share the result."""
    for block in blocks:
        for part in block.modules():
            # The number of tokens from other ranks is known only at run time.
            if isinstance(part, ExpertParallel) and part.dispatcher is not None:
                part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]
        # Compile `forward` instead of the module, so that hooks, such as FSDP's, stay outside of the compiled code.
        block.forward = torch.compile(block.forward)


def warn_compiled_split_backward(stages: NodeView, schedule: NodeView, mesh: NodeView) -> Iterator[Problem]:
    """Warn if the schedule delays weight gradients, but compiled or fused parts compute them with input gradients."""
    if not _splits_backward(schedule, mesh):
        return
    effect = f"so W, which [{schedule.name}] schedules in the bubble, has nothing to compute"
    alternative = f"or use a schedule without W in [{schedule.name}], such as pipeline.schedules.one_f_one_b"
    if stages.settings["compile"]:
        text = f"a compiled block computes weight gradients together with input gradients, {effect}"
        yield stages.warning("compile", text, f"write compile = false, {alternative}")
    for part in (*stages.neighbours("model"), *stages.neighbours("transforms")):
        if computes_both_gradients_at_once(part.component):
            text = f"{part.use!r} computes weight gradients together with input gradients, {effect}"
            hint = f"replace it by recompute or compile in [{stages.name}], {alternative}"
            yield part.warning("use", text, hint)


def warn_compiled_recompute(stages: NodeView) -> Iterator[Problem]:
    """Warn about recompute policies ignored by compiled blocks."""
    if not stages.settings["compile"]:
        return
    text = "torch chooses what compiled blocks recompute, so '{}' only applies outside them"
    if (policy := stages.settings["recompute"]) in ("selective", "quantized"):
        hint = 'write recompute = "blocks" or "none", or compile = false'
        yield stages.warning("recompute", text.format(policy), hint)
    for schedule in stages.neighbours("schedule"):
        if "selective" in (schedule.settings.get("recompute") or ()):
            hint = f"leave recompute.selective out, or write compile = false in [{stages.name}]"
            yield schedule.warning("recompute", text.format("selective"), hint)


def _splits_backward(schedule: NodeView, mesh: NodeView) -> bool:
    """Return whether a schedule splits stages' backward passes; False if the schedule has problems."""
    built, ranks = build_schedule_or_none(schedule), PerDimension.from_settings(mesh.settings).pipeline
    try:
        # Rank 0 is enough: in a schedule that computes ranks separately, all ranks split or none.
        program = None if built is None else build_program_of_rank_and_neighbours(built, 0, ranks, 2 * ranks)
    except UserError:
        return False
    return program is not None and bool((program.op == BACKWARD_INPUT).any())
