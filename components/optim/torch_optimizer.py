"""Shared by the optimizers: the step at a scheduled learning rate, and state by parameter name."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.optim.adamw_step import ADAM_MOMENTS, WideGradientStep
from drawloom.components.optim.parameter_groups import ParameterGroup, param_groups, unmatched
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.run import Step
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.stages import Parameters
from drawloom.graph import Problem
from drawloom.graph.wiring.node import NodeView

Named = Sequence[tuple[str, nn.Parameter]]

KEEP_UPDATES = (
    'write use = "optim.stochastic_adamw" in [{}], or keep float32 masters, as --overlay with_mixed_precision does: '
    'parameter = "float32", compute = "bfloat16"'
)


def named_state(optimizers: Sequence[torch.optim.Optimizer], named: Named) -> dict[str, Any]:
    """The optimizers' state of each parameter by name; empty before the first step in which it had a gradient."""
    held = {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}
    return {name: dict(held.get(parameter, {})) for name, parameter in named}


def load_named_state(optimizers: Sequence[torch.optim.Optimizer], named: Named, state: dict[str, Any]) -> None:
    """
    Replace optimizers' state by a copy of a saved one; an empty state is that of an optimizer before its first step.

    Raises KeyError for state of other parameters.
    """
    parameters = dict(named)
    if state and parameters.keys() != state.keys():
        raise KeyError(f"optimizer state differs for {sorted(parameters.keys() ^ state.keys())}")
    names = {parameter: name for name, parameter in named}
    for optimizer in optimizers:
        every = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        values = {number: _copies(state[name]) for number, name in enumerate(every) if state.get(name)}
        # torch moves each tensor to its parameter's device: a fused optimizer counts its steps on the accelerator.
        optimizer.load_state_dict({"state": values, "param_groups": optimizer.state_dict()["param_groups"]})


def _copies(parts: dict[str, Any]) -> dict[str, Any]:
    """Copies of tensors, which the optimizer may change in place."""
    return {key: part.detach().clone() if isinstance(part, Tensor) else part for key, part in parts.items()}


def _state_on_meta(parameter: nn.Parameter, moments: Sequence[str]) -> dict[str, Tensor]:
    """Return the shapes and dtypes of torch's state of a parameter."""
    state = {name: torch.empty_like(parameter, device="meta") for name in moments}
    # torch's optimizers count the steps of each parameter for the bias correction of two means
    return {"step": torch.empty((), device="meta"), **state} if {*ADAM_MOMENTS} <= {*moments} else state


@contextmanager
def _narrow_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Cast gradients of other dtypes than their parameters' to these."""
    every = [part for group in optimizer.param_groups for part in group["params"]]
    wide = [part for part in every if part.grad is not None and part.grad.dtype != part.dtype]
    dtypes = [part.grad_dtype for part in wide]
    for part in wide:
        narrow, part.grad = part.grad.to(part.dtype), None
        part.grad_dtype = part.dtype
        part.grad = narrow
    yield
    for part, dtype in zip(wide, dtypes, strict=True):  # autograd sums the next step's gradients in it again
        part.grad, part.grad_dtype = None, dtype


class TorchOptimizer:
    """
    The phase and the state of optimizers of torch; subclasses create them in `open`.

    Each trained parameter is in one of them.
    """

    parameters: Parameters
    mesh: Mesh
    lr: float
    weight_decay: float
    groups: Sequence[ParameterGroup]
    _optimizers: list[torch.optim.Optimizer]

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Warnings of groups without a parameter, and of weights whose small updates are lost by rounding."""
        yield from unmatched(node)
        stages = node.neighbour("parameters")
        precision = stages and stages.neighbour("precision")
        if precision and precision.settings.get("parameter") == "bfloat16":
            # Half of the spacing of numbers with 8 significant bits, at the upper end of a binade.
            text = f"[{node.name}] rounds bfloat16 to the nearest: updates of less than 1/512 of a weight are lost"
            yield precision.warning("parameter", text, KEEP_UPDATES.format(node.name))

    def moments(self) -> dict[str, Sequence[str]]:
        """Return the names of the running means that the optimizer keeps of each parameter from its first step on."""
        raise NotImplementedError

    def memory_bytes(self) -> dict[MemoryKind, int]:
        """Bytes of the moments; counters of steps, 4 bytes for a parameter, are left out."""
        moments = self.moments()
        return {"optimizer_state": sum(len(moments[name]) * part.nbytes for name, part in self.parameters.named())}

    def forecast_state(self) -> dict[str, Any]:
        """Return the state after a step in which every parameter has a gradient, on the meta device."""
        moments = self.moments()
        return {name: _state_on_meta(part, moments[name]) for name, part in self.parameters.named()}

    def run_phase(self, step: Step) -> None:
        """
        Update the weights unless the step is skipped, and clear the gradients.

        The learning rate, written as `lr`, is the base learning rate times `lr_factor` (1 without one). Each group
        multiplies it by its `lr_multiplier`.
        """
        step.state["lr"] = lr = self.lr * step.state.get("lr_factor", 1.0)
        for optimizer in self._optimizers:
            step.apply_update(partial(self._update, optimizer, lr))
            optimizer.zero_grad()

    def _update(self, optimizer: torch.optim.Optimizer, lr: float, skip: Tensor | None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_multiplier"]
        # GradScaler's name for the flag, which torch's fused optimizers read.
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        # torch's fused optimizers take one dtype for weights and gradients; ours take others.
        with nullcontext() if isinstance(optimizer, WideGradientStep) else _narrow_gradients(optimizer):
            optimizer.step()

    def _param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, for torch."""
        return param_groups(self.parameters, self.groups, self.weight_decay, self.mesh)

    def state_slices(self) -> dict[str, TensorSlice | None]:
        """The parameters that this rank trains, and of which it has a slice."""
        return self.parameters.slices()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state by parameter name; tensors of any shape."""
        return named_state(self._optimizers, self.parameters.named())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state into this optimizer; KeyError if it is of other parameters."""
        load_named_state(self._optimizers, self.parameters.named(), state)
