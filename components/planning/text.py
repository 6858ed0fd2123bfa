"""Plans as text."""

import math
from collections.abc import Iterator, Sequence
from datetime import timedelta

import attrs

from drawloom.components.pipeline.program.recomputation import describe_recompute_policies
from drawloom.components.planning.plan import Plan
from drawloom.components.storage.byte_size import choose_byte_unit_and_its_size, format_decimal_byte_size
from drawloom.graph.cli.terminal import format_table


def format_plan(plan: Plan) -> str:
    """Return a plan as text: a line per subject, and a table by rank."""
    lines = [f"{label:8}{text}" for label, text in _iterate_summary_lines(plan)]
    return "\n".join([*lines, "", *_format_rank_table(plan)])


def _iterate_summary_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield lines about a plan as (subject, text): device, step, memory and time."""
    sizes = [f"{name} {size}" for name, size in plan.mesh.sizes.without_expert_dimensions().items() if size > 1]
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
    yield "device", f"{plan.device.name}, {': '.join([ranks, ' x '.join(sizes)] if sizes else [ranks])}"
    rows = f"{plan.rows.count} row{'s' * (plan.rows.count > 1)} of {plan.rows.length:,} tokens"
    documents = f" in documents of {plan.rows.document:,.0f}" if plan.rows.document < math.inf else ""
    count = f"{plan.microbatches} microbatch{'es' * (plan.microbatches > 1)}"
    yield "step", f"{count} of {rows}{documents} on each replica, {plan.tokens:,} tokens in all"
    fullest = max(plan.memory, key=lambda memory: memory.peak_bytes)
    limit = f" of {format_decimal_byte_size(plan.device.memory)}" if plan.device.memory else ""
    verdict = "" if plan.fits else ": too much"
    yield (
        "memory",
        f"{format_decimal_byte_size(fullest.peak_bytes)}{limit} at most, in {fullest.action_at_peak}{verdict}",
    )
    if plan.choice is not None:
        yield "choice", describe_memory_choice(plan)
    if host := max(memory.host for memory in plan.memory):
        yield "host", f"{format_decimal_byte_size(host)} of each rank in host memory, at most"
    yield "time", f"{plan.time.seconds:.3g} s a step: {format_time_percentages(plan)}"
    mfu = "" if plan.mfu is None else f", {plan.mfu:.1%} MFU"
    per_rank = f", {plan.tokens_per_second / plan.ranks:,.0f} on each rank" if plan.ranks > 1 else ""
    yield "speed", f"{plan.tokens_per_second:,.0f} tokens/s{per_rank}{mfu}"
    if plan.length is not None:
        length = timedelta(seconds=round(plan.length.steps * plan.time.seconds))
        yield "run", f"{plan.length} in {length}, without evaluations and checkpoints"


def describe_memory_choice(plan: Plan) -> str:
    """Return a memory policy's choice, and how much slower it is than unlimited memory."""
    if (choice := plan.choice) is None or plan.kept_seconds is None:
        return "by settings"
    parts = [f"recomputed: {recomputed}"] if (recomputed := describe_recompute_policies(choice.recompute)) else []
    parts += ["inputs of norms and gates in 8 bits round gradients"] * ("quantized" in choice.recompute)
    parts += [f"offloaded: stages {', '.join(map(str, sorted(choice.offloaded)))}"] * bool(choice.offloaded)
    parts += [describe_host_states(choice.host_states)] * any(choice.host_states)
    if not parts:
        return "everything is kept on the device"
    return f"{'; '.join(parts)}: {plan.time.seconds / plan.kept_seconds - 1:.1%} slower than with unlimited memory"


def describe_host_states(fractions: Sequence[float]) -> str:
    """Return how much of the optimizer's state is in host memory, for the ranks with the least and the most."""
    least, most = (f"{fraction:.0%}" for fraction in (min(fractions), max(fractions)))
    amount = "" if least == most == "100%" else f"{most} of " if least == most else f"{least} to {most} of "
    return f"{amount}optimizer state in host memory"


def format_time_percentages(plan: Plan) -> str:
    """Return the step time's parts in %, without parts near 0."""
    parts = attrs.asdict(plan.time)
    shown = {"passes": parts.pop("compute") - parts["sending"], **parts}
    percent = {name: f"{seconds / plan.time.seconds:.1%}" for name, seconds in shown.items()}
    return ", ".join(f"{name} {part}" for name, part in percent.items() if part != "0.0%")


KINDS = ("parameters", "masters", "compute_copies", "optimizer_state")


def _format_rank_table(plan: Plan) -> Iterator[str]:
    """Yield a table with a column per pipeline rank: persistent bytes, and bytes at the peak."""
    kinds = [kind for kind in KINDS if any(kind in memory.persistent for memory in plan.memory)]
    labels = list(dict.fromkeys(label for memory in plan.memory for label in memory.activation_bytes_at_peak))
    shown = [
        label
        for label in labels
        if any(memory.activation_bytes_at_peak.get(label, 0) >= 0.01 * memory.peak_bytes > 0 for memory in plan.memory)
    ]
    unit, scale = choose_byte_unit_and_its_size(plan.peak_bytes)
    sizes = [(kind.replace("_", " "), [memory.persistent.get(kind, 0) for memory in plan.memory]) for kind in kinds]
    sizes += [("gradients", [memory.peak_gradient_bytes for memory in plan.memory])]
    sizes += [
        (f"  {label}", [memory.activation_bytes_at_peak.get(label, 0) for memory in plan.memory]) for label in shown
    ]
    rest = [
        sum(size for label, size in memory.activation_bytes_at_peak.items() if label not in shown)
        for memory in plan.memory
    ]
    sizes += [("  other activations", rest)] if any(rest) else []
    sizes += [("buffers", [sum(memory.buffers.values()) for memory in plan.memory])]
    sizes += [("peak", [memory.peak_bytes for memory in plan.memory])]
    yield format_table(
        [
            [unit, *(f"rank {rank}" for rank in range(0, plan.ranks, plan.ranks // len(plan.memory)))],
            ["stages", *(" ".join(map(str, memory.stages)) for memory in plan.memory)],
            *([name, *(f"{size / scale:.3f}" for size in row)] for name, row in sizes),
            ["in", *(memory.action_at_peak for memory in plan.memory)],
        ]
    )
