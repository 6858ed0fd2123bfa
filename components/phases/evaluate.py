"""The loss on data that is never learned from."""

import time

import torch

from drawloom.components.ports.data import ValidationData
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.pipeline import Executor
from drawloom.components.ports.run import Cadence, Step, a_cadence, due
from drawloom.graph import component, setting


@component(reads=("weights",), writes=("validation_loss",), impact="safe")
class Evaluate:
    """Measures the mean loss by token over all held-out rows, the same on every rank and mesh."""

    data: ValidationData
    executor: Executor
    mesh: Mesh
    every: Cadence = setting(default=100, check=a_cadence, doc='steps between evaluations, or "last" or "never"')

    def run_phase(self, step: Step) -> None:
        """Leave `validation_loss`, in nats by token, if it is due."""
        if not due(self.every, step):
            return
        began = time.monotonic()
        losses = self.executor.evaluate(self.data.batches())
        sums = torch.stack([losses.total, losses.weight])
        self.mesh.group("pipeline").sum(sums)
        self.mesh.replicas.sum(sums)
        total, weight = sums.tolist()
        if weight > 0:
            step.outputs["validation_loss"] = total / weight
        step.excluded_seconds += time.monotonic() - began
