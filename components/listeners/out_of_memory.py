"""Failed allocations: how they are recognized, and the settings that would help."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.ports import chooses_recompute

# torch's messages when an allocation fails, on a GPU and on the CPU
ALLOCATION = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
CPU_MESSAGE = "can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is a failed allocation on the device or the host."""
    # torch raises a plain RuntimeError if the CPU's allocator fails
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and CPU_MESSAGE in str(error)
    )


def describe_out_of_memory(error: BaseException, sizes: Mapping[str, int], report: Any) -> str:
    """Return the failed allocation, sizes in memory, and helpful settings of `report`, a MemoryReport."""
    table = [f"  {kind:25}  {format_decimal_byte_size(size):>12}" for kind, size in sizes.items()]
    remedies = [f"  {remedy}" for remedy in _list_memory_saving_settings(report)]
    allocation = f"{report.device.device} is out of memory: {_describe_failed_allocation(error)}"
    return "\n".join([allocation, *table, "what would help:", *remedies])


def _describe_failed_allocation(error: BaseException) -> str:
    """Return the failed allocation's size, and the pipeline's note on where it failed, if there is one."""
    match = ALLOCATION.search(str(error))
    text = "an allocation failed" if match is None else f"{_format_allocation_size(match[1])} could not be allocated"
    return " ".join([text, *getattr(error, "__notes__", ())])


def _format_allocation_size(amount: str) -> str:
    """Return an amount such as "1024 bytes" in readable units."""
    number, unit = amount.split()
    return format_decimal_byte_size(int(number)) if unit == "bytes" else amount


def _list_memory_saving_settings(report: Any) -> Iterator[str]:
    """Yield settings that reduce memory, with their present values."""
    for node, batching in report.batching.items():
        if batching.micro_size > 1:
            yield f"{node}.micro_size = {batching.micro_size}: with fewer rows, activations take less"
    for node, rows in report.data.items():
        yield f"rows of {rows.length:,} tokens in [{node}]: with shorter ones, activations take less"
    planned = [node for node, schedule in report.schedules.items() if chooses_recompute(schedule)]
    for node in planned:
        yield f"{node}.memory: with less, stages keep fewer activations, and compute more of them again"
    for node, stages in report.stages.items():
        if not planned and any(stage.recompute == "none" for stage in stages.local):
            yield f'{node}.recompute = "none": with "selective" or "blocks", fewer activations are kept'
    for node, precision in report.precision.items():
        if precision.compute.itemsize > 2:
            yield f'{node}.compute = "{_dtype_name(precision.compute)}": with "bfloat16", activations take half'
        elif precision.parameter.itemsize > 2:
            yield (
                f'{node}.parameter = "{_dtype_name(precision.parameter)}": with "bfloat16" and '
                "optim.stochastic_adamw, there are no masters, and the optimizer state takes half"
            )
    for node, mesh in report.mesh.items():
        shards = mesh.sizes.data_shard
        yield f"{node}.data_shard = {shards}: with more ranks, each holds less of parameters, gradients and moments"


def _dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")
