"""AdamW on bfloat16 weights with stochastic rounding, so small updates accumulate."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, ClassVar, Literal

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.distributed.rng import derive_seed
from drawloom.components.optim.parameter_groups import AdamGroup, check_betas, check_patterns, param_groups
from drawloom.components.ports.distributed import Device, Mesh
from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.run import RunInfo, Step
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.stages import Parameters, gradient_of
from drawloom.graph import UserError, above, at_least, component, setting
from drawloom.graph.problems import Problem
from drawloom.graph.wiring.node import NodeView
from drawloom.kernels.adamw import ALL, AdamwEager, ParamState, step_scalars
from drawloom.kernels.operation import why_no_triton

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@attrs.frozen
class _Launch:
    """Parameters in one kernel launch, with their learning-rate multiplier and betas."""

    parameters: Sequence[nn.Parameter]
    stepper: Any
    lr_multiplier: float
    betas: tuple[float, float]


@component(reads=("gradients", "lr_factor?", "skip?"), writes=("weights", "lr"))
class StochasticAdamW:
    """
    AdamW with stochastic rounding for bfloat16 weights, without float32 master weights.

    Norms and biases do not decay. One launch updates all weights; groups with their own learning rate or betas take one
    more launch each. With `amsgrad`, the largest mean of squares is the maximum over the rounded means.

    The noise depends on the run's seed, the parameter's name, the element's index in the parameter and the step number.
    It is the same for any rank layout, and resuming is bit-exact.
    """

    defers_scaling: ClassVar[bool] = True

    parameters: Parameters
    mesh: Mesh
    job: RunInfo
    device: Device
    lr: float = setting(check=above(0), doc="base learning rate")
    betas: tuple[float, float] = setting(
        default=(0.9, 0.95), check=check_betas, doc="decay rates for the two running means"
    )
    eps: float = setting(default=1e-8, check=above(0), doc="constant added to the denominator")
    weight_decay: float = setting(default=0.1, check=at_least(0), doc="decoupled weight decay coefficient")
    amsgrad: bool = setting(
        default=False,
        impact="incompatible",
        doc="divide by the largest mean of squares so far (Reddi et al. 2018); keeps a third tensor per parameter",
    )
    maximize: bool = setting(default=False, doc="maximize the objective instead of minimizing it")
    groups: list[AdamGroup] = setting(factory=list, doc="parameter groups with their own options; the first match wins")
    state_dtype: Literal["bfloat16", "float32"] = setting(
        default="bfloat16",
        impact="incompatible",
        doc="running mean dtype; bfloat16 is rounded stochastically too",
    )
    implementation: Literal["auto", "triton", "eager"] = setting(
        default="auto", impact="safe", doc="auto is triton on a GPU, else eager; both give the same bits"
    )
    _params: dict[str, ParamState] = attrs.field(init=False, factory=dict)
    _launches: list[_Launch] = attrs.field(init=False, factory=list)
    _steps: int = attrs.field(init=False, default=0)
    _last: Step | None = attrs.field(init=False, default=None)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Warn about groups without a parameter, and require a GPU for Triton."""
        yield from check_patterns(node)
        device = node.neighbour("device")
        if node.settings["implementation"] == "triton" and device and device.settings.get("kind") == "cpu":
            yield node.problem("implementation", "'triton' runs on GPUs, and the device is the CPU", "write 'auto'")

    def open(self) -> None:
        """Create all parameters' optimizer state, filled with zeros."""
        slices = self.parameters.slices()
        groups = param_groups(self.parameters, self.groups, self.weight_decay, self.mesh)
        decay = {part: group["weight_decay"] for group in groups for part in group["params"]}
        for name, parameter in self.parameters.named_parameters():
            weight = parameter.detach()
            moments = {key: torch.zeros_like(weight, dtype=DTYPES[self.state_dtype]) for key in self._moments.values()}
            first, width, stride = slice_rows(slices[name])
            self._params[name] = ParamState(
                weight,
                weight_decay=decay[parameter],
                key=derive_seed(self.job.seed, "stochastic_adamw", name),
                first=first,
                width=width,
                stride=stride,
                **moments,
            )
        kinds: dict[tuple[float, tuple[float, float]], list[nn.Parameter]] = {}
        for group in groups:
            kinds.setdefault((group["lr_multiplier"], group.get("betas", self.betas)), []).extend(group["params"])
        implementation, states = self._implementation(), self._states()
        for (lr_multiplier, betas), parts in kinds.items():
            stepper = implementation([states[part] for part in parts], self.maximize)
            self._launches.append(_Launch(parts, stepper, lr_multiplier, betas))

    def run_phase(self, step: Step) -> None:
        """
        Update the weights unless the step is skipped, clear the gradients, and write the learning rate as `lr`.

        A group multiplies the learning rate by its `lr_multiplier`.
        """
        step.state["lr"] = lr = self.lr * step.state.get("lr_factor", 1.0)
        step.apply_update(partial(self._update, lr, self._steps_taken() + 1, step.take_factors()))
        self._last = step
        for _, parameter in self.parameters.named_parameters():
            parameter.grad = None

    def _update(self, lr: float, number: int, factors: Tensor | None, skip: Tensor | None) -> None:
        for launch in self._launches:
            scalars = step_scalars(lr * launch.lr_multiplier, launch.betas, self.eps, number)
            launch.stepper.step([gradient_of(part) for part in launch.parameters], scalars, number, skip, factors)

    @property
    def _moments(self) -> dict[str, str]:
        """Return ParamState's fields by their keys in the state dict."""
        moments = {"mean": "exp_avg", "square": "exp_avg_sq"}
        return moments | ({"max_square": "max_exp_avg_sq"} if self.amsgrad else {})

    def _states(self) -> dict[nn.Parameter, ParamState]:
        return {parameter: self._params[name] for name, parameter in self.parameters.named_parameters()}

    def _steps_taken(self) -> int:
        """Return the number of steps without the skipped ones, after waiting for the last step."""
        if self._last is not None:
            self._steps += not self._last.skip_reason
            self._last = None
        return self._steps

    def memory_bytes(self) -> dict[MemoryKind, int]:
        """Return the bytes of the running means, and with `amsgrad` of the largest mean of squares."""
        count = sum(parameter.numel() for _, parameter in self.parameters.named_parameters())
        return {"optimizer_state": len(self._moments) * count * DTYPES[self.state_dtype].itemsize}

    def state_slices(self) -> dict[str, TensorSlice | None]:
        return self.parameters.slices()

    def state_dict(self) -> dict[str, Any]:
        """Return running means by parameter (its shape, `state_dtype`), and the step count."""
        steps = self._steps_taken()
        return {
            name: {key: getattr(param, field) for key, field in self._moments.items()} | {"steps": steps}
            for name, param in self._params.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state into this optimizer. Raises KeyError for other parameters' state."""
        if state.keys() != self._params.keys():
            raise KeyError(f"optimizer state differs for {sorted(state.keys() ^ self._params.keys())}")
        steps = {values["steps"] for values in state.values()}
        if len(steps) > 1:
            raise ValueError(f"parameters have taken different numbers of steps, {sorted(steps)}")
        for name, param in self._params.items():
            for key, field in self._moments.items():
                getattr(param, field).copy_(state[name][key])
        self._steps, self._last = steps.pop() if steps else 0, None

    def _implementation(self) -> Any:
        """Return the stepper class. Raises UserError if `implementation` is triton and the device can't run it."""
        wanted, problem = self.implementation, ""
        if wanted == "auto" and self.device.device.type == "cpu":
            wanted = "eager"
        if wanted != "eager":
            problem = why_no_triton(self.device.device)
        if wanted == "triton" and problem:
            raise UserError(f"optim.stochastic_adamw: implementation is 'triton', but {problem}; write 'auto'", 2)
        if wanted == "eager" or problem:
            return AdamwEager
        from drawloom.kernels.triton.adamw import AdamwTriton

        return AdamwTriton


def slice_rows(part: TensorSlice | None) -> tuple[int, int, int]:
    """
    Return where a slice's elements are in the flat tensor: index of the first, row width, and row stride.

    None is the whole tensor. Raises UserError for a slice whose rows are not equally far apart.
    """
    if part is None or not part.numel:
        return 0, ALL, 0
    strides = [prod(part.shape[dim + 1 :]) for dim in range(len(part.shape))]
    first = sum(offset * stride for offset, stride in zip(part.offsets, strides, strict=True))
    last = max((dim for dim, size in enumerate(part.shape) if part.size[dim] != size), default=0)
    numbers_rows = [dim for dim in range(last) if part.size[dim] > 1]
    if not numbers_rows:
        return first, ALL, 0
    if any(strides[dim] != strides[inner] * part.size[inner] for dim, inner in pairwise(numbers_rows)):
        text = f"a slice of shape {part.size} at {part.offsets} of a tensor of shape {part.shape}"
        raise UserError(f"optim.stochastic_adamw has no noise for {text}; take another mesh or optimizer")
    return first, part.size[last] * strides[last], strides[numbers_rows[-1]]
