"""Root mean square (RMS) of activations by layer."""

import re
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.ports.distributed import Device, Mesh
from drawloom.components.ports.model import BatchContext, TokenContext
from drawloom.components.ports.run import Step
from drawloom.components.ports.stages import Stages
from drawloom.components.ports.tracking import Accumulator, Value
from drawloom.components.state.trees import list_leaves
from drawloom.graph import UserError, component

LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)$")


@component(impact="safe")
class ActivationRms:
    """
    `activation_rms/<layer>`: the root mean square over a layer's outputs, for all tokens and channels in a step.

    Layers are the modules `layers.<number>`, numbered as in the whole model, on all stages. Padding counts like other
    tokens; evaluations do not count. The values depend neither on the batch size nor on gradient accumulation.
    """

    stages: Stages
    mesh: Mesh
    device: Device

    _layers: list[int] = attrs.field(init=False, factory=list)
    _sums: Tensor = attrs.field(init=False, default=None)
    _hooks: list[Any] = attrs.field(init=False, factory=list)
    # tokens of the current microbatch; None if its rows do not consist of tokens
    _tokens: int | None = attrs.field(init=False, default=0)

    def open(self) -> None:
        """Gather all stages' layers, and observe this rank's. Raises UserError if there are none."""
        local = {
            int(match[1]): module
            for stage in self.stages.local
            for name, module in stage.module.named_modules()
            if (match := LAYER.match(name))
        }
        layers_by_rank = self.mesh.pipeline_group.gather_json([*local])
        self._layers = sorted({number for numbers in layers_by_rank for number in numbers})
        if not self._layers:
            raise UserError("no module of the model is called layers.<number>; leave out metrics.activation_rms", 2)
        self._sums = torch.zeros(len(self._layers), 2, dtype=torch.float64, device=self.device.device)
        self._hooks = [stage.module.register_forward_pre_hook(self._note_token_count) for stage in self.stages.local]
        self._hooks += [self._add_layer_hook(module, self._layers.index(number)) for number, module in local.items()]

    def close(self) -> None:
        """Stop observing layers."""
        while self._hooks:
            self._hooks.pop().remove()

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """Sums of squares and element counts, by layer."""
        return {"sums": Accumulator(shape=(len(self._layers), 2), scope="activations")}

    def forget_passes(self) -> None:
        self._sums.zero_()

    def measure_on_rank(self, step: Step) -> Mapping[str, Tensor]:
        """Return sums of squares and counts over the forward passes since the last step: float64 (layers, 2)."""
        sums = self._sums.clone()
        self._sums.zero_()  # in place: hooks that are part of a CUDA graph add to this tensor
        return {"sums": sums}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """Return the values, None for a layer without outputs or with infinite ones; `sums` are float64 (layers, 2)."""
        means = (totals["sums"][:, 0] / totals["sums"][:, 1]).sqrt()
        known = torch.isfinite(means).tolist()
        return {
            f"activation_rms/{layer}": value if is_known else None
            for layer, value, is_known in zip(self._layers, means.tolist(), known, strict=True)
        }

    def _note_token_count(self, _module: nn.Module, inputs: tuple[Any, BatchContext]) -> None:
        """Note the microbatch's token count before a forward pass, to exclude padding along `tensor`."""
        shared = inputs[1]
        self._tokens = shared.positions.numel() if isinstance(shared, TokenContext) else None

    def _add_layer_hook(self, module: nn.Module, index: int) -> Any:
        """Add a hook to sum a layer's squared outputs."""

        def add(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # Evaluations run without gradients. A recomputed forward pass changes sum and count alike.
            if torch.is_grad_enabled():
                hidden = next(leaf for leaf in list_leaves(output) if isinstance(leaf, Tensor)).detach().flatten(0, -2)
                if self._tokens is not None:
                    # The last ranks along `tensor` have padding if tokens do not divide evenly.
                    hidden = hidden[: max(self._tokens - self.mesh.indices.tensor * len(hidden), 0)]
                self._sums[index, 0] += _sum_squares_in_float32(hidden)
                self._sums[index, 1] += hidden.numel()

        return module.register_forward_hook(add)


def _sum_squares_in_float32(tensor: Tensor) -> Tensor:
    """Sum the squares, float64 (), without a wider copy of the tensor."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm.double().square()
