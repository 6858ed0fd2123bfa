"""
Passes before a step's, for losses that depend on them: by the model without adapters, and for sums over the step.
"""

from collections.abc import Iterator

import attrs
import torch

from drawloom import NodeView, Problem
from drawloom.components.weights.adapted import disable_adapters
from drawloom.ports import (
    ForwardRunner,
    FrozenModel,
    MeasuresStep,
    Microbatches,
    Referenced,
    add_reference_values,
    embeds_on_every_rank,
    trains_base_weights,
)


def prepare_loss_inputs(microbatches: Microbatches, runner: ForwardRunner) -> Microbatches:
    """Return microbatches with the values from the loss's own passes in their batches."""
    loss = runner.objective
    if isinstance(loss, Referenced) and loss.reference == "adapters":
        microbatches = add_values_without_adapters(loss, microbatches, runner)
    return add_step_sums(loss, microbatches, runner) if isinstance(loss, MeasuresStep) else microbatches


def add_values_without_adapters(loss: Referenced, microbatches: Microbatches, runner: ForwardRunner) -> Microbatches:
    """Return microbatches, on the last stage's rank with reference values by the model without its adapters."""
    with disable_adapters(stage.module for stage in runner.stages.local):
        outputs = runner.run_forward(loss.reference_values, microbatches)
    # A tensor of inference mode can't be part of an autograd graph, but its clone can.
    values = {number: output.clone() for number, output in outputs.items()}
    return add_reference_values(loss, microbatches, values)


def add_step_sums(loss: MeasuresStep, microbatches: Microbatches, runner: ForwardRunner) -> Microbatches:
    """Return microbatches, on the last stage's rank with the loss's sums over the step. A collective."""
    outputs = runner.run_forward(loss.compute_part_of_step_sums, microbatches)
    if not outputs:  # alike on all ranks of the data group, which have the same stages
        return microbatches
    sums = torch.stack([outputs[number] for number in range(len(microbatches))]).sum(0)
    runner.mesh.data_group.sum(sums)
    return [attrs.evolve(inputs, batch=loss.with_step_sums(inputs.batch, sums)) for inputs in microbatches]


def check_loss_passes(executor: NodeView, loss: NodeView, stages: NodeView) -> Iterator[Problem]:
    """Yield problems for a loss whose passes the executor can't run, or whose reference is missing or unsuitable."""
    reference = loss.settings.get("reference")
    if embeds_on_every_rank(executor.component):
        if reference in ("adapters", "model"):
            text = f"[{loss.name}] compares with another model on the last rank, and [{executor.name}] "
            yield loss.problem("reference", f"{text}computes losses on all", 'write use = "pipeline.executor"')
        elif issubclass(loss.component, MeasuresStep):
            text = f"[{loss.name}] measures the whole step before its first pass, and [{executor.name}]"
            yield loss.problem("use", f"{text} does not support this", 'write use = "pipeline.executor"')
    if reference == "adapters":
        yield from _check_reference_adapters(loss, stages)
    frozen = [feature for feature in executor.neighbours("features") if feature.implements(FrozenModel)]
    if reference == "model" and len(frozen) != 1:
        text = f"[{loss.name}] compares with a frozen model, and [{executor.name}] has {len(frozen) or 'none'}"
        yield loss.problem(
            "reference", text, 'write one table, such as [teacher], with use = "stages.frozen" and a model'
        )


def _check_reference_adapters(loss: NodeView, stages: NodeView) -> Iterator[Problem]:
    """Yield a problem if adapters are missing or train the base's weights, and a warning if they begin trained."""
    adapters = stages.neighbours("adapters")
    if stages.settings.get("adapter_weights") is not None:
        text = (
            f"[{loss.name}] compares with the base model, without the adapter of {stages.settings['adapter_weights']}"
        )
        yield loss.warning("reference", text, "to compare with both, take the merged export as the base model")
    if not adapters:
        other = ', or reference = "model" with a frozen model: --overlay with_all_weights_and_reference'
        text = f"[{loss.name}] compares the model with itself without adapters, and [{stages.name}] has no adapters"
        yield loss.problem("use", text, f'write adapters = ["@lora"] in [{stages.name}]{other}')
    for adapter in adapters:
        if trains_base_weights(adapter.component):
            text = f"[{loss.name}] compares the model with itself without adapters, which [{adapter.name}] changes"
            yield adapter.problem("use", text, f"leave it out of adapters in [{stages.name}]")
