"""AdamW on bfloat16 weights, each step rounded up or down at random, so that small ones add up."""

from collections.abc import Iterator
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from drawloom.components.optim.torch_optimizer import check_betas, decays, local_part, shard_of
from drawloom.components.ports.distributed import Device
from drawloom.components.ports.model import Parameters
from drawloom.components.ports.run import RunInfo, Step
from drawloom.graph import UserError, above, at_least, component, setting
from drawloom.graph.build.node import NodeView
from drawloom.graph.problems import Problem
from drawloom.kernels.operation import why_no_triton
from drawloom.kernels.stochastic_adamw import PER_DRAW, StochasticAdamwEager, Trained, numbers_of

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@component(reads=("gradients", "lr_factor?"), writes=("weights", "lr"))
class StochasticAdamW:
    """
    AdamW with stochastic rounding of bfloat16 weights, in one launch for all of them; norms and biases do not decay.

    The noise follows from the run's seed, the parameter's name, the element's place in it and the number of the step:
    replicas stay equal, shards differ, and a run that resumes goes on with the same bits.
    """

    parameters: Parameters
    job: RunInfo
    device: Device
    lr: float = setting(check=above(0), doc="the base learning rate")
    betas: tuple[float, float] = setting(default=(0.9, 0.95), check=check_betas, doc="decay of the two running means")
    eps: float = setting(default=1e-8, check=above(0), doc="keeps the denominator from zero")
    weight_decay: float = setting(default=0.1, check=at_least(0), doc="fraction of a weight lost each step, times lr")
    state_dtype: Literal["bfloat16", "float32"] = setting(
        default="bfloat16",
        impact="incompatible",
        doc="dtype of the running means; bfloat16 is rounded stochastically too",
    )
    implementation: Literal["auto", "triton", "eager"] = setting(
        default="auto", impact="safe", doc="auto is triton on a GPU, else eager; both give the same bits"
    )
    _trained: dict[str, Trained] = attrs.field(init=False, factory=dict)
    _stepper: Any = attrs.field(init=False, default=None)
    _steps: int = attrs.field(init=False, default=0)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Triton needs a GPU."""
        devices = node.neighbours("device")
        if node.settings["implementation"] == "triton" and devices and devices[0].settings.get("kind") == "cpu":
            yield node.problem("implementation", "'triton' runs on GPUs, and the device is the CPU", "write 'auto'")

    def open(self) -> None:
        """Take the parameters, with running means of zero."""
        for name, parameter in self.parameters.named():
            weight, shard = local_part(parameter.detach()), shard_of(parameter, PER_DRAW)
            mean, square = (torch.zeros_like(weight, dtype=DTYPES[self.state_dtype]) for _ in range(2))
            decay = self.weight_decay if decays(parameter) else 0.0
            key = shard.key(self.job.seed, "stochastic_adamw", name)
            self._trained[name] = Trained(weight, mean, square, decay, key, shard.first)
        self._stepper = self._implementation()(list(self._trained.values()))

    def run_phase(self, step: Step) -> None:
        """Apply the gradients, unless the step is refused, and drop them; the rate is left as `lr`."""
        step.outputs["lr"] = self.lr * step.outputs.get("lr_factor", 1.0)
        parameters = [parameter for _, parameter in self.parameters.named()]
        if not step.skip_reason:
            self._steps += 1
            numbers = numbers_of(step.outputs["lr"], self.betas, self.eps, self._steps)
            self._stepper.step([_gradient(parameter) for parameter in parameters], numbers, self._steps)
        for parameter in parameters:
            parameter.grad = None

    def state_names(self) -> list[str]:
        """The names of the parameters that this rank trains."""
        return list(self._trained)

    def state_dict(self) -> dict[str, Any]:
        """Both running means of each parameter, and the number of steps, from which the noise follows."""
        return {
            name: {"mean": trained.mean, "square": trained.square, "steps": self._steps}
            for name, trained in self._trained.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them over."""
        if state.keys() != self._trained.keys():
            raise KeyError(f"optimizer state differs for {sorted(state.keys() ^ self._trained.keys())}")
        steps = {values["steps"] for values in state.values()}
        if len(steps) > 1:
            raise ValueError(f"parameters have taken different numbers of steps, {sorted(steps)}")
        for name, trained in self._trained.items():
            trained.mean.copy_(state[name]["mean"])
            trained.square.copy_(state[name]["square"])
        self._steps = steps.pop() if steps else 0

    def _implementation(self) -> Any:
        """What takes the steps; a UserError if it is to be Triton and can't."""
        wanted, problem = self.implementation, ""
        if wanted == "auto" and self.device.device.type == "cpu":
            wanted = "eager"
        if wanted != "eager":
            problem = why_no_triton(self.device.device)
        if wanted == "triton" and problem:
            raise UserError(f"optim.stochastic_adamw: implementation is 'triton', but {problem}; write 'auto'", 2)
        if wanted == "eager" or problem:
            return StochasticAdamwEager
        from drawloom.kernels.triton.stochastic_adamw import StochasticAdamwTriton

        return StochasticAdamwTriton


def _gradient(parameter: Tensor) -> Tensor:
    """The local part of a gradient; zeros where nothing reached the parameter."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return local_part(gradient)
