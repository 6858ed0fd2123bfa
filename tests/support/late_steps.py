"""A small model trained by the trainer and a run's phases, with steps whose gradients are not finite."""

import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.distributed.sum_over_shards import SumOverParameters
from drawloom.components.gradients.clip_norm import ClipNorm
from drawloom.components.gradients.synchronize import Synchronize
from drawloom.components.kernels.auto import AutoKernels
from drawloom.components.loss.next_token import NextToken
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.optim.adamw import AdamW
from drawloom.components.optim.sgd import SGD
from drawloom.components.optim.stochastic_adamw import StochasticAdamW
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.ports.pipeline import STEP_SPECS
from drawloom.components.ports.run import Events, Phase, Randomness, Step, Stop
from drawloom.components.run.trainer import Trainer
from drawloom.components.stages.materialized import MaterializedStages
from drawloom.graph import UserError
from drawloom.graph.testing import build, fake
from support.pipelines import Job, batches, schedule
from support.steps import LateState

OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 0.01}, {}),
    "mixed": (AdamW, {"lr": 0.01}, {"compute": "bfloat16"}),
    "sgd": (SGD, {"lr": 0.5}, {}),
    # A CPU rounds the factors of bfloat16 gradients to bfloat16 where the host knows them.
    "stochastic": (StochasticAdamW, {"lr": 0.01}, {"parameter": "bfloat16", "gradient": "float32"}),
}
"""Classes, their settings, and dtypes."""


@attrs.define
class Small:
    """A model of two layers on one rank; in the steps `bad` a gradient is infinite."""

    mesh: Any
    device: ComputeDevice
    optimizer: str
    norm: Any
    bad: Collection[int] = ()
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext
    losses: list[Any] = attrs.field(factory=list)
    norms: list[Any] = attrs.field(factory=list)
    reasons: list[str] = attrs.field(factory=list)
    stages: MaterializedStages = attrs.field(init=False)
    updater: Any = attrs.field(init=False)
    error: str = ""
    _steps: list[Step] = attrs.field(factory=list)
    _watching: Any = None

    def train(self, steps: int, max_skipped_steps: int = 100) -> "Small":
        """Run so many steps; `watch` is entered when a backward pass is issued, and left after the update."""
        make, settings, dtypes = OPTIMIZERS[self.optimizer]
        precision = DtypePolicy(**dtypes)
        kernels = AutoKernels(device=self.device)
        sizes: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 20, "hidden_size": 16}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24}
        model = Qwen3Dense(kernels=kernels, **sizes)
        common: dict[str, Any] = {"mesh": self.mesh, "device": self.device, "schedule": schedule("one_f_one_b")}
        self.stages = stages = MaterializedStages(
            model=model, loss=NextToken(), precision=precision, job=Job(), **common
        )
        stages.open()
        executor = ProgramExecutor(stages=stages, objective=stages.loss, **common)
        if make is StochasticAdamW:
            settings = settings | {"job": Job(), "device": self.device}
        self.updater = make(parameters=stages, mesh=self.mesh, **settings)
        self.updater.open()
        reduce = SumOverParameters(mesh=self.mesh)
        synchronize = Synchronize(parameters=stages, mesh=self.mesh, reduce=reduce, norm=self.norm)

        def forward_backward(step: Step) -> None:
            if self.norm == "device" and self.device.device.type == "cpu":
                step.state = LateState()
            microbatches = batches(2)
            step.state.clear_for_new_step(len(microbatches), STEP_SPECS)
            step.state["batches"] = microbatches
            executor.run_forward_and_backward(step.state)
            if step.index in self.bad:
                gradient = next(
                    parameter.grad for _, parameter in stages.named_parameters() if parameter.grad is not None
                )
                gradient.view(-1)[0] = math.inf

        phases = [
            fake(Phase, run_phase=forward_backward),
            fake(Phase, run_phase=self._begin),
            synchronize,
            ClipNorm(parameters=stages, max_norm=0.1),
            self.updater,
            fake(Phase, run_phase=self._end),
        ]
        edges = {"events": fake(Events), "stop": fake(Stop), "randomness": fake(Randomness)}
        trainer: Trainer = build(
            "run.trainer",
            phases=phases,
            steps=steps,
            max_skipped_steps=max_skipped_steps,
            **edges,
        )
        try:
            trainer.run()
        except UserError as error:
            self.error = str(error)
        for step in self._steps:
            self.reasons.append(step.skip_reason)
            self.losses.append(step.state.number("loss"))
            self.norms.append(step.state.number("grad_norm"))
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self.stages.named_parameters()}

    def _begin(self, step: Step) -> None:
        self._watching = self.watch()
        self._watching.__enter__()

    def _end(self, step: Step) -> None:
        self._watching.__exit__(None, None, None)
        self._steps.append(step)
