"""Tensor-parallel exchanges beside the products in attention and feed-forward networks."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from drawloom import NodeView, Problem, component, internal, setting
from drawloom.components.model.decoder.layer import Attention, GatedMlp
from drawloom.components.model.decoder.specs import LayerContext
from drawloom.components.model.layers import Linear
from drawloom.components.overlap.products import multiply_and_scatter, multiply_gathered
from drawloom.components.overlap.shifts import PeerShifts, Shifts
from drawloom.components.parallel.tensor_ranks import TensorParallel, unpad_tokens
from drawloom.ports import Group, Precision, RankSlice, StageFeature, StageNodes, WrappingOrder, put_class_before


@component
class OverlappedProducts(StageFeature):
    """
    Tensor-parallel ranks that exchange tokens while they multiply, in attention and in gated feed-forward networks.

    A rank multiplies its own tokens while it receives others, and sends sums while it multiplies. Layers with biases,
    adapters or other formats exchange before and after their products.
    """

    order: ClassVar[WrappingOrder] = WrappingOrder.PRODUCTS
    excludes: ClassVar[Mapping[str, str]] = {
        "stages.compiled": "torch.compile does not trace products beside exchanges",
        "kernels.batch_invariant": "its bits do not depend on the number of tokens, as bits by rank do",
    }
    keeps_layer_shapes: ClassVar[bool] = True

    through: Literal["messages", "memory"] = setting(
        "`messages` between ranks, or `memory` that one host's ranks share, without use of a GPU's multiprocessors",
        default="messages",
    )
    _peers: PeerShifts | None = internal(None)

    @classmethod
    def check_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[Problem]:
        """Yield a problem for CUDA graphs, which would repeat the slots of their recording."""
        if feature.settings["through"] == "memory" and nodes.find_feature("pipeline.captured"):
            text = "ranks use slots of the shared memory in turn, and a CUDA graph always uses the recorded ones"
            yield feature.problem("through", text, 'write through = "messages"')

    @classmethod
    def describe_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[str]:
        if (ranks := nodes.sizes.tensor) > 1:
            yield f"attention and feed-forward networks exchange tokens of {ranks} ranks while they multiply"

    def convert(self, module: nn.Module, precision: Precision, splits: MutableMapping[str, RankSlice]) -> None:
        """Give attention and feed-forward networks products beside exchanges; other classes stay."""
        parts: Iterator[Any] = module.modules()
        for part in parts:
            if type(part) in CLASSES:
                put_class_before(part, CLASSES[type(part)])
                part.shifts = self._choose_shifts(part.ranks.group)

    def _choose_shifts(self, group: Group) -> Shifts:
        if self.through == "messages" or group.size == 1:
            return group
        self._peers = self._peers or PeerShifts(group)
        return self._peers


class OverlappedAttention(Attention):
    """Attention with products beside exchanges."""

    shifts: Shifts

    def project_qkv(self, hidden: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
        layers = [self.q_proj, self.k_proj, *([] if self.spec.keys_as_values else [self.v_proj])]
        if not _can_overlap(self, hidden, layers):
            return super().project_qkv(hidden, shape)
        weights = [layer.weight for layer in layers]
        products = multiply_gathered(hidden.to(weights[0].dtype), weights, self.shifts)
        q, k, *v = (unpad_tokens(product, shape) for product in products)
        return q, k, *(v or (k,))

    def project_back(self, mixed: Tensor) -> Tensor:
        tokens = mixed.flatten(0, -2)
        if len(tokens) % self.ranks.size or not _can_overlap(self, mixed, (self.o_proj,)):
            return super().project_back(mixed)
        return multiply_and_scatter(tokens.to(self.o_proj.weight.dtype), self.o_proj.weight, self.shifts)


class OverlappedMlp(GatedMlp):
    """Gated feed-forward network with products beside exchanges."""

    shifts: Shifts

    def forward(self, hidden: Tensor, context: LayerContext | None = None) -> Tensor:
        """Map this rank's tokens (tokens, hidden_size)."""
        layers = [getattr(self, name) for name in self.activation.inner_projections]
        if not _can_overlap(self, hidden, [*layers, self.down_proj]):
            return super().forward(hidden, context)
        weights = [layer.weight for layer in layers]
        products = multiply_gathered(hidden.to(weights[0].dtype), weights, self.shifts)
        mixed = self.activation.apply(self.kernels, products)
        return multiply_and_scatter(mixed, self.down_proj.weight, self.shifts)


CLASSES: Mapping[type, type[Attention | GatedMlp]] = {Attention: OverlappedAttention, GatedMlp: OverlappedMlp}


def _can_overlap(module: TensorParallel, tokens: Tensor, layers: Sequence[Linear]) -> bool:
    """Return whether layers are plain products, without biases, formats or hooks, of several ranks in a run."""
    return (
        module.ranks.size > 1
        and not tokens.is_meta
        and tokens.device.type == module.ranks.group.device.type
        and not torch.compiler.is_compiling()
        and all(
            type(layer) is Linear and layer.bias is None and not (layer._forward_hooks or layer._forward_pre_hooks)
            for layer in layers
        )
    )
