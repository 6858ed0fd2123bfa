"""The size of activations, layer by layer."""

import re
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.ports.distributed import Device, Mesh
from drawloom.components.ports.model import BatchContext, TokenContext
from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.components.ports.stages import Stages
from drawloom.components.state.trees import leaves
from drawloom.graph import UserError, component

LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)$")


@component(impact="safe")
class ActivationRms:
    """
    `activation_rms/<layer>`: the root mean square of what each layer gives, over a step's tokens and channels.

    Layers are the modules `layers.<number>`, numbered as in the whole model, on all stages. Padding counts like other
    tokens, evaluations do not. It depends neither on the size of a batch nor on how that is cut into microbatches.
    """

    stages: Stages
    mesh: Mesh
    device: Device

    _layers: list[int] = attrs.field(init=False, factory=list)
    _sums: Tensor = attrs.field(init=False, default=None)
    _hooks: list[Any] = attrs.field(init=False, factory=list)
    # of the microbatch that a stage is given; None if its rows do not consist of tokens
    _tokens: int | None = attrs.field(init=False, default=0)

    def open(self) -> None:
        """Learn the layers of all stages, and observe those of this rank; UserError if there are none."""
        mine = {
            int(found[1]): module
            for stage in self.stages.local
            for name, module in stage.module.named_modules()
            if (found := LAYER.match(name))
        }
        self._layers = sorted({each for ranks in self.mesh.pipeline_group.gather_json([*mine]) for each in ranks})
        if not self._layers:
            raise UserError("no module of the model is called layers.<number>; leave out metrics.activation_rms", 2)
        self._sums = torch.zeros(len(self._layers), 2, dtype=torch.float64, device=self.device.device)
        self._hooks = [stage.module.register_forward_pre_hook(self._count) for stage in self.stages.local]
        self._hooks += [self._observe(module, self._layers.index(number)) for number, module in mine.items()]

    def close(self) -> None:
        """Observe no layers any more."""
        while self._hooks:
            self._hooks.pop().remove()

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """By layer, the sum of squares, and of how many numbers it is."""
        return {"sums": Accumulator(shape=(len(self._layers), 2), of="activations")}

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """Sums of squares, and counts, over the forward passes since the last step: float64 (layers, 2)."""
        sums = self._sums.clone()
        self._sums.zero_()  # in place: hooks that are part of a CUDA graph add to this tensor
        return {"sums": sums}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """None where a layer gave nothing, or something that is not finite; `sums` are float64 (layers, 2)."""
        means = (totals["sums"][:, 0] / totals["sums"][:, 1]).sqrt()
        known = torch.isfinite(means).tolist()
        return {
            f"activation_rms/{layer}": value if is_known else None
            for layer, value, is_known in zip(self._layers, means.tolist(), known, strict=True)
        }

    def _count(self, _module: nn.Module, inputs: tuple[Any, BatchContext]) -> None:
        shared = inputs[1]
        self._tokens = shared.positions.numel() if isinstance(shared, TokenContext) else None

    def _observe(self, module: nn.Module, place: int) -> Any:
        def add(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # Evaluations run without gradients. A recomputed forward pass adds to the sum and to the count alike.
            if torch.is_grad_enabled():
                hidden = next(leaf for leaf in leaves(output) if isinstance(leaf, Tensor)).detach().flatten(0, -2)
                if self._tokens is not None:
                    # The last ranks along `tensor` have rows that fill up what does not divide.
                    hidden = hidden[: max(self._tokens - self.mesh.indices.tensor * len(hidden), 0)]
                self._sums[place, 0] += _sum_of_squares(hidden)
                self._sums[place, 1] += hidden.numel()

        return module.register_forward_hook(add)


def _sum_of_squares(tensor: Tensor) -> Tensor:
    """Float64 (); of a narrower tensor without a wider copy of it."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm.double().square()
