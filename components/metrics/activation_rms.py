"""Root mean square (RMS) of activations by layer."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from drawloom import UserError, component, internal
from drawloom.components.metrics.pass_sums import PassSums
from drawloom.components.state.trees import list_leaves
from drawloom.ports import BatchContext, Mesh, MetricTotals, MetricValues, Stages, Step, TokenContext

LAYER = re.compile(r"^(?!loss\.)(?:.*\.)?layers\.(\d+)$")  # a loss may have layers of its own


@component(impact="safe")
class ActivationRms(PassSums):
    """
    `activation_rms/<layer>`: the root mean square over a layer's outputs, for all tokens and channels in a step.

    Layers are the modules `layers.<number>`, numbered as in the whole model, on all stages. Neither padding nor
    evaluations count. The values depend neither on the batch size nor on gradient accumulation.
    """

    stages: Stages
    mesh: Mesh

    _layers: list[int] = internal(factory=list)
    _hooks: list[Any] = internal(factory=list)
    # whether a position of the current microbatch has a token, (positions,); None if its rows do not consist of tokens
    _is_token: Tensor | None = internal(None)

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
        self.allocate_sums(len(self._layers), 2)  # of squares, and of elements
        self._hooks = [stage.module.register_forward_pre_hook(self._note_padding) for stage in self.stages.local]
        self._hooks += [self._add_layer_hook(module, self._layers.index(number)) for number, module in local.items()]

    def close(self) -> None:
        """Stop observing layers."""
        while self._hooks:
            self._hooks.pop().remove()

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the values, None for a layer without outputs or with infinite ones; `sums` are float64 (layers, 2)."""
        means = (totals["sums"][:, 0] / totals["sums"][:, 1]).sqrt()
        known = torch.isfinite(means).tolist()
        return {
            f"activation_rms/{layer}": value if is_known else None
            for layer, value, is_known in zip(self._layers, means.tolist(), known, strict=True)
        }

    def _note_padding(self, _module: nn.Module, inputs: tuple[Any, BatchContext]) -> None:
        """Note the microbatch's padding before a forward pass."""
        shared, self._is_token = inputs[1], None
        if isinstance(shared, TokenContext):
            padding = torch.zeros_like(shared.positions, dtype=torch.bool) if shared.padding is None else shared.padding
            self._is_token = ~padding.flatten()

    def _add_layer_hook(self, module: nn.Module, index: int) -> Any:
        """Add a hook to sum a layer's squared outputs."""

        def add(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # Evaluations run without gradients. A recomputed forward pass changes sum and count alike.
            if torch.is_grad_enabled():
                hidden = next(leaf for leaf in list_leaves(output) if isinstance(leaf, Tensor)).detach().flatten(0, -2)
                squares, counted = _sum_squares_by_token(hidden), hidden.new_ones((), dtype=torch.bool)
                if self._is_token is not None:
                    # The last ranks along `tensor` have fewer tokens, and more padding, if tokens do not divide evenly.
                    counted = self._is_token[self.mesh.indices.tensor * len(hidden) :][: len(hidden)]
                    squares = squares[: len(counted)]
                self._sums[index, 0] += squares.where(counted, 0).sum()
                self._sums[index, 1] += counted.expand_as(squares).sum() * hidden.shape[-1]

        return module.register_forward_hook(add)


def _sum_squares_by_token(hidden: Tensor) -> Tensor:
    """Sum the squares of hidden states (tokens, channels): float64 (tokens,), without a wider copy."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(hidden, dim=-1, dtype=dtype)
    return norms.double().square()
