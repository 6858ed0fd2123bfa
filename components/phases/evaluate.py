"""Evaluation: the loss on the validation split."""

import torch

from drawloom import component, internal, setting
from drawloom.ports import (
    LOSSES,
    AveragedWeights,
    Cadence,
    Device,
    Executor,
    Mesh,
    Step,
    ValidationData,
    create_step_state,
    describe_cadence_fault,
    exclude_from_rates,
    is_due,
    use_averages_if_any,
)


@component(
    reads=("weights",), writes=("validation_loss", "validation_cross_entropy", "initial_validation_loss"), impact="safe"
)
class Evaluate:
    """
    Mean loss per token over some validation rows, equal on every rank and for every mesh.

    If the loss sums its `cross_entropy`, `validation_cross_entropy` has the mean. With an `average`, the losses under
    the averaged weights.
    """

    data: ValidationData
    executor: Executor
    mesh: Mesh
    device: Device
    average: AveragedWeights | None = None
    every: Cadence = setting(
        'steps between evaluations, or "last" or "never"', default=100, check=describe_cadence_fault
    )
    at_start: bool = setting(
        "whether a new run also evaluates before its first step, so the validation loss curve begins at step "
        "0; not if `every` is never",
        default=False,
    )

    _initial: float | None = internal(None)

    def after_restore(self, restored_step: int) -> None:
        """Evaluate a new run's initial weights."""
        if self.at_start and self.every != "never":
            self._initial = self._measure_means_per_token().get("loss") if restored_step == 0 else None

    def run_phase(self, step: Step) -> None:
        """
        Write `validation_loss` and `validation_cross_entropy`, in nats per token, at `every`'s steps.

        A new run's first step also gets the `initial_validation_loss`.
        """
        if self._initial is not None:
            step.state["initial_validation_loss"], self._initial = self._initial, None
        if not is_due(self.every, step):
            return
        with exclude_from_rates(step, self.mesh, self.device.device):
            for name, mean in self._measure_means_per_token().items():
                step.state[f"validation_{name}"] = mean

    def _measure_means_per_token(self) -> dict[str, float]:
        """Return the means of the loss and of its cross entropy, without those that are unknown. A collective."""
        with use_averages_if_any(self.average):
            state = create_step_state(self.data.batches())
            self.executor.evaluate(state)
        losses = state[LOSSES]
        own = [losses["loss"], losses["weight"], torch.zeros(()), torch.zeros(())]
        if (cross_entropies := losses["sums"].get("cross_entropy")) is not None:
            own[2:] = cross_entropies, losses["weight"]
        # sums are reduced, not means, because ranks may have different numbers of tokens
        sums = torch.stack([part.double().sum().to(losses["loss"].device) for part in own])
        self.mesh.pipeline_group.sum(sums)
        self.mesh.data_group.sum(sums)
        pairs = zip(("loss", "cross_entropy"), sums.view(2, 2).tolist(), strict=True)
        return {name: total / weight for name, (total, weight) in pairs if weight > 0}
