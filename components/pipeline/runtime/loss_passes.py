"""
Passes before those of a step, for losses that depend on them: of the model without adapters, and for sums over a step.
"""

from collections.abc import Iterator, Sequence

import attrs
import torch

from drawloom.components.ports.adapters import trains_base_weights
from drawloom.components.ports.passes import ForwardRunner, MicrobatchInputs, PassFeature, add_reference_values
from drawloom.components.ports.pipeline import Loss, MeasuresStep, Referenced, embeds_on_every_rank
from drawloom.components.ports.stages import FrozenModel
from drawloom.components.weights.adapted import disable_adapters
from drawloom.graph import Problem
from drawloom.graph.wiring.node import NodeView


@attrs.frozen(eq=False)
class ReferenceWithoutAdapters(PassFeature):
    """Values of the model without its adapters, for a loss that compares the model with itself."""

    loss: Referenced

    def prepare_inputs(
        self, microbatches: Sequence[MicrobatchInputs], runner: ForwardRunner
    ) -> Sequence[MicrobatchInputs]:
        with disable_adapters(stage.module for stage in runner.stages.local):
            outputs = runner.run_forward(self.loss.reference_values, microbatches)
        # A tensor of inference mode can't be part of an autograd graph, but its clone can.
        values = {number: output.clone() for number, output in outputs.items()}
        return add_reference_values(self.loss, microbatches, values)


@attrs.frozen(eq=False)
class StepSums(PassFeature):
    """Sums over all microbatches and ranks of a step, for a loss that depends on them."""

    loss: MeasuresStep

    def prepare_inputs(
        self, microbatches: Sequence[MicrobatchInputs], runner: ForwardRunner
    ) -> Sequence[MicrobatchInputs]:
        """Return the microbatches, on the last stage's rank with the sums. A collective."""
        outputs = runner.run_forward(self.loss.compute_part_of_step_sums, microbatches)
        if not outputs:  # alike on all ranks of the data group, which have the same stages
            return microbatches
        sums = torch.stack([outputs[number] for number in range(len(microbatches))]).sum(0)
        runner.mesh.data_group.sum(sums)
        return [attrs.evolve(inputs, batch=self.loss.with_step_sums(inputs.batch, sums)) for inputs in microbatches]


def list_loss_features(loss: Loss) -> list[PassFeature]:
    """Return the features that run a loss's own passes."""
    features: list[PassFeature] = []
    if isinstance(loss, Referenced) and loss.reference == "adapters":
        features.append(ReferenceWithoutAdapters(loss))
    if isinstance(loss, MeasuresStep):
        features.append(StepSums(loss))
    return features


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
    """Yield a problem if adapters are missing, or train weights of the base."""
    adapters = stages.neighbours("adapters")
    if not adapters:
        other = ', or reference = "model" with a frozen model'
        text = f"[{loss.name}] compares the model with itself without adapters, and [{stages.name}] has no adapters"
        yield loss.problem("use", text, f'write adapters = ["@lora"] in [{stages.name}]{other}')
    for adapter in adapters:
        if trains_base_weights(adapter.component):
            text = f"[{loss.name}] compares the model with itself without adapters, which [{adapter.name}] changes"
            yield adapter.problem("use", text, f"leave it out of adapters in [{stages.name}]")
