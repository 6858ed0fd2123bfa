"""Exponential moving average for the weights (Polyak and Juditsky 1992; Izmailov et al. 2018, arXiv 1803.05407)."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom import NodeView, Problem, between, component, internal, setting
from drawloom.ports import MemoryKind, NodeState, Parameters, Step, TensorSlice


@component(reads=("weights", "skip?"))
class WeightAverage:
    """
    Exponential moving average (EMA) of the trained weights: average = decay * average + (1 - decay) * weights.

    The average starts as the weights after the first step, and is updated after every later step unless the step is
    skipped. It has the shape of this rank's parameter slice, in float32 or wider. [evaluate], [export] and [sample] use
    the average instead of the weights if they have the setting `average = "@ema"`.
    """

    parameters: Parameters
    decay: float = setting("decay rate of the average per step", default=0.999, check=between(0, 1))

    _averages: dict[str, Tensor] = internal(factory=dict)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Warn if some used nodes have an edge to this average, and others could have one."""
        used = {name for other in node.nodes.values() for name in other.needs}
        able = {name: other for name, other in node.nodes.items() if name in used and _may_have_average(other.spec.cls)}
        averaging = [name for name, other in able.items() if (edge := other.edges.get("average")) and edge.targets]
        for name in able if averaging else ():
            if name not in averaging:
                text = f"[{averaging[0]}] uses the average of [{node.name}], and [{name}] the last weights"
                yield NodeView(able[name], node.nodes).warning("average", text, f'write average = "@{node.name}"')

    @torch.no_grad()
    def run_phase(self, step: Step) -> None:
        """Update the average, unless the step is skipped; the first call copies the weights."""
        if not self._averages:
            self._averages = {
                name: _cast_to_float32_or_wider(part.detach().clone())
                for name, part in self.parameters.named_parameters()
            }
        else:
            step.apply_update_unless_skipped(self._update_average)

    def _update_average(self, skip: Tensor | None) -> None:
        """Update the average, unless the flag `skip`, float32 () on the device, is 1."""
        for name, parameter in self.parameters.named_parameters():
            average = self._averages[name]
            share: Any = 1 - self.decay
            if skip is not None:
                share = (share * (1 - skip.double())).to(average.dtype)
            average.lerp_(parameter.to(average.dtype), share)

    def averages(self) -> Mapping[str, Tensor]:
        return self._averages

    def use_averages(self) -> AbstractContextManager[None]:
        return self._replace_weights_by_averages()

    @contextmanager
    def _replace_weights_by_averages(self) -> Iterator[None]:
        parameters = self.parameters.named_parameters() if self._averages else ()
        weights = [(name, part, part.detach().clone()) for name, part in parameters]
        try:
            # in place, so the version counters mark casts of the weights as outdated
            for name, part, _ in weights:
                part.detach().copy_(self._averages[name])
            yield
        finally:
            for _, part, weight in weights:
                part.detach().copy_(weight)

    def device_bytes(self) -> dict[MemoryKind, int]:
        """Return the bytes of the averages as optimizer state."""
        state = self.forecast_state_after_first_step()
        return {"optimizer_state": sum(part["average"].nbytes for part in state.values())}

    def state_slices(self) -> dict[str, TensorSlice | None]:
        return self.parameters.parameter_slices()

    def state_dict(self) -> NodeState:
        """Return every parameter's `average`, in float32 or wider; an empty entry before the first step."""
        averages = self._averages
        return {name: {"average": averages[name]} if averages else {} for name, _ in self.parameters.named_parameters()}

    def forecast_state_after_first_step(self) -> NodeState:
        """Return the averages' shapes and dtypes, on the meta device."""
        return {
            name: {
                "average": torch.empty_like(part, dtype=torch.promote_types(part.dtype, torch.float32), device="meta")
            }
            for name, part in self.parameters.named_parameters()
        }

    def load_state_dict(self, state: NodeState) -> None:
        """Copy saved averages. Raises KeyError if their parameters are not this rank's."""
        named = dict(self.parameters.named_parameters())
        if state and named.keys() != state.keys():
            raise KeyError(f"averages differ for {sorted(named.keys() ^ state.keys())}")
        self._averages = {
            name: _cast_to_float32_or_wider(entry["average"].to(named[name].device, copy=True))
            for name, entry in state.items()
            if entry
        }


def _cast_to_float32_or_wider(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _may_have_average(kind: type) -> bool:
    """Return whether a component has the optional edge `average`."""
    return attrs.has(kind) and any(field.name == "average" for field in attrs.fields(kind))
