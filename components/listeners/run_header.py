"""Header before a run's first step: its model, data and device."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from drawloom import Every
from drawloom.ports import (
    Batching,
    DescribedStages,
    LanguageModel,
    LayerRange,
    Model,
    PackedDataset,
    ValidationData,
    count_steps_of_epochs,
)

MIN_FULL_RATE = 0.99  # packed rows are full except the last row


def iterate_header_lines(run: Any) -> Iterator[tuple[str, str]]:
    """Yield the header as (subject, text): run, model, data, device; `run` is the RunSummary, which calls this."""
    yield "run", f"{run.job.name}, in {run.job.folder_path}"
    for model in run.models.values():
        with torch.device("meta"):
            whole = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
        described: Every[DescribedStages] = run.stages
        by_stages = (stages.describe_features(whole) for stages in described.values() if stages.model is model)
        count = f"{sum(parameter.numel() for parameter in whole.parameters()):,} parameters"
        phrases = [*_describe_weight_dtypes(run), *chain.from_iterable(by_stages)]
        yield "model", ", ".join([*_list_architectures(model), count, *phrases])
    for rows in run.data.values():
        steps = (_describe_tokens_per_step(rows, batching) for batching in run.batching.values())
        epochs = (
            f"{counter.rows_per_epoch:,} rows and {count_steps_of_epochs(1, counter):,} steps in an epoch"
            for counter in run.counters.values()
        )
        validation = map(_format_validation_row_counts, run.validation.values())
        # Estimate the training tokens without padding
        tokens = f"{round(rows.fill_rate('train') * rows.count_rows('train') * rows.length):,} tokens to learn from"
        yield "data", "; ".join([tokens, *epochs, *steps, *validation])
    yield "device", _describe_device(run)


def _describe_weight_dtypes(run: Any) -> Iterator[str]:
    """Yield the dtypes of weights and computation."""
    for precision in run.precision.values():
        stored, compute = (str(dtype).removeprefix("torch.") for dtype in (precision.parameter, precision.compute))
        yield stored if stored == compute else f"{stored}, computed in {compute}"


def _describe_device(run: Any) -> str:
    """Return device, processes, mesh sizes and hosts."""
    device = run.device.device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    sizes = [f"{name} {size}" for name, size in run.mesh.sizes.settings().items() if size > 1]
    processes = f"{run.mesh.world.size} process{'es' * (run.mesh.world.size > 1)}"
    if (hosts := max((launch.node_count for launch in run.launches.values()), default=1)) > 1:
        processes += f" on {hosts} hosts"
    words = [kind, f"{processes}: {' x '.join(sizes)}" if sizes else processes]
    if device.type == "cpu":
        words.append(f"CPU threads{' of each' * (run.mesh.world.size > 1)}: {torch.get_num_threads()}")
    return ", ".join(words)


def _format_validation_row_counts(validation: ValidationData) -> str:
    """Return how many validation rows are used."""
    used, count = validation.count_evaluated_and_total_rows()
    return f"validation: {used:,} of {count:,} rows"


def _describe_tokens_per_step(rows: PackedDataset, batching: Batching) -> str:
    """Return the tokens in a step, estimated from the fill rate if rows are padded."""
    fill = rows.fill_rate("train")
    size = f"in a step, in microbatches of {batching.micro_size:,} rows"
    if fill > MIN_FULL_RATE:
        return f"{batching.global_size * rows.length:,} {size}"
    tokens = round(fill * batching.global_size * rows.length)
    return f"about {tokens:,} {size} of {rows.length:,}, {100 * fill:.1f} % full"


def _list_architectures(model: Model) -> list[str]:
    """Return the Hugging Face architectures of a language model, or the model's class name."""
    if not isinstance(model, LanguageModel):
        return [type(model).__name__]
    return [str(name) for name in model.hugging_face_config().get("architectures", [])]
