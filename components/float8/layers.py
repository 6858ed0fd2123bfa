"""Layers with products in float8, whose classes take the place of the classes of a module's layers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from drawloom.components.experts.local import LocalExperts
from drawloom.components.model.decoder.experts import Experts, Router, SharedGate, SparseMoeBlock
from drawloom.components.model.decoder.layer import Attention, Block, GatedMlp
from drawloom.components.model.decoder.specs import Branch, LayerContext, SwiGlu
from drawloom.components.model.layers import Linear
from drawloom.components.parallel.data_shard import find_untied_heads
from drawloom.kernels.float8.eager import Float8Kernels, Float8Rows
from drawloom.kernels.float8.experts import (
    CachedFloat8Experts,
    expert_rows_float8,
    experts_float8,
    pack_weights,
    unpack_weights,
)
from drawloom.kernels.float8.linear import (
    CachedFloat8Weights,
    linear_float8,
    linear_quantized_float8,
    linears_float8,
    mlp_float8,
    rms_norm_float8,
)
from drawloom.kernels.recompute.marks import accept_rounded_inputs
from drawloom.ports import (
    AdaptedLayer,
    LinearLayer,
    NormAndSum,
    StoredLayer,
    combine_classes,
    put_class_before,
    supports_expert_parallel,
)

Candidate = LinearLayer | Experts
"""Layer that may multiply in float8."""


class Float8Message:
    """Encoding of weights in messages, as the elements and scales by row with which a layer multiplies."""

    itemsize: ClassVar[int] = 1
    pack_weights = staticmethod(pack_weights)
    unpack_weights = staticmethod(unpack_weights)


class Float8Module(nn.Module):
    """Base of modules whose class was replaced."""

    float8: Float8Kernels


class Float8Linear(Float8Module, LinearLayer):
    """Linear layer with products in float8. A quantized weight is dequantized, and rounded by rows."""

    def multiply_by_weight(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.to(self.weight.dtype)
        if isinstance(self, StoredLayer):
            return linear_quantized_float8(self.float8, self.decode_weight, rows, self.weight, bias)
        with accept_rounded_inputs():
            return linear_float8(self.float8, rows, self.weight, bias)


class Float8Experts(Float8Module, Experts):
    """Experts with products in float8, as one operation if tokens stay on their rank."""

    def forward(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor) -> Tensor:
        """Return (..., hidden_size), as `Experts` does; tokens and gradients are quantized before copies to rows."""
        if not _has_all_experts_on_rank(self):
            return super().forward(hidden, chosen, probabilities)
        # Not `accept_rounded_inputs`: elements recomputed from rounded tokens would not fit the saved scales of rows.
        routes, x = self.kernels.moe_routes(chosen, self.num_experts), hidden.to(self.gate_up_proj.dtype)
        return experts_float8(self.float8, x, probabilities, self.gate_up_proj, self.down_proj, routes)

    def apply_to_rows(self, rows: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
        with accept_rounded_inputs():
            return expert_rows_float8(self.float8, rows, scale, self.gate_up_proj, self.down_proj, ends)


class Float8Attention(Float8Module, Attention):
    """Attention that multiplies by the weights of queries, keys and values in one operation."""

    def project_qkv(self, hidden: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
        if not (layers := self.list_joint_layers()):
            return super().project_qkv(hidden, shape)
        hidden = self.ranks.gather_tokens(hidden, shape)
        weights = [layer.weight for layer in layers]
        with accept_rounded_inputs():
            q, k, *v = linears_float8(self.float8, hidden.to(weights[0].dtype), weights)
        return q, k, *(v or (k,))

    def list_joint_layers(self) -> Sequence[Linear]:
        """Return the projections of the operation; none if one of them is not a plain product in float8."""
        children: Mapping[str, Any] = dict(self.named_children())
        layers = [children[name] for name in ("q_proj", "k_proj", "v_proj") if name in children]  # keys may be values
        return layers if all(map(_is_plain, layers)) else ()


class Float8Mlp(Float8Module, GatedMlp):
    """Gated feed-forward network as one operation."""

    def forward(self, hidden: Tensor, context: LayerContext | None = None) -> Tensor:
        """Map hidden states (..., hidden_size)."""
        if not self.list_joint_layers():
            return super().forward(hidden, context)
        gate, up, down = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        hidden = self.ranks.gather_tokens(hidden)
        with accept_rounded_inputs():
            outputs = mlp_float8(self.float8, hidden.to(gate.dtype), gate, up, down)
        return self.ranks.reduce_scatter_tokens(outputs)

    def list_joint_layers(self) -> Sequence[Linear]:
        """Return gate and up, if the whole network is one operation."""
        is_joint = self.activation == SwiGlu() and all(map(_is_plain, (self.gate_proj, self.up_proj, self.down_proj)))
        return (self.gate_proj, self.up_proj) if is_joint else ()


class Float8Block(Float8Module, Block):
    """Layer whose norms round their results for the operation that follows, in the same pass."""

    def add_and_norm(self, output: Tensor | None, hidden: Tensor, branch: Branch) -> NormAndSum:
        if branch.norm_before is None or not _rounds_input(self.get_submodule(branch.name)):
            return super().add_and_norm(output, hidden, branch)
        norm: Any = self.get_submodule(branch.norm_before)
        x, residual = (hidden, None) if output is None else (output, hidden)
        return rms_norm_float8(self.float8, x, residual, norm.weight, norm.eps, norm.zero_centered)


CLASSES: Mapping[type, type[Float8Module]] = {
    LinearLayer: Float8Linear,
    Experts: Float8Experts,
    Attention: Float8Attention,
    GatedMlp: Float8Mlp,
    Block: Float8Block,
}
"""The class with float8 by module class; subclasses, such as layers with adapters, keep their own methods."""


def enable_float8(module: Any, kernels: Float8Kernels) -> None:
    """Let a module compute in float8."""
    put_class_before(module, next(float8_class for kind, float8_class in CLASSES.items() if isinstance(module, kind)))
    module.float8 = kernels


PLAIN = combine_classes(Float8Linear, Linear)


def _is_plain(layer: Linear) -> bool:
    """Return whether a layer is a plain product in float8: no adapter, bias, quantized weight, or hook."""
    return layer.__class__ is PLAIN and layer.bias is None and not (layer._forward_hooks or layer._forward_pre_hooks)


def _has_all_experts_on_rank(layer: Experts) -> bool:
    """Return whether all experts are on this rank, so that tokens stay here."""
    if layer.dispatcher is None or isinstance(layer.dispatcher, LocalExperts):
        return True
    return supports_expert_parallel(layer.dispatcher) and len(layer.gate_up_proj) == layer.num_experts


def _rounds_input(module: nn.Module) -> bool:
    """Return whether a module's first operations multiply its input in float8."""
    if isinstance(module, SparseMoeBlock):
        return isinstance(module.experts, Float8Experts) and _has_all_experts_on_rank(module.experts)
    return isinstance(module, Float8Attention | Float8Mlp) and bool(module.list_joint_layers())


def find_float8_candidates(module: nn.Module) -> dict[str, Candidate]:
    """
    Return the layers of a stage's module, or of a whole model, that can use float8: no heads, routers and layers with
    one output, and no experts with adapters, biases or other activations than SwiGLU.
    """
    heads = find_untied_heads(module)
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, LinearLayer | Experts) and _can_use_float8(layer) and layer not in heads
    }


def _can_use_float8(layer: Candidate) -> bool:
    if isinstance(layer, Experts):
        return not (isinstance(layer, AdaptedLayer) or layer.spec.expert_biases or layer.spec.activation != SwiGlu())
    return not isinstance(layer, Router | SharedGate)


def get_float8_weights(layer: Candidate) -> dict[str, Tensor]:
    """Return a layer's weights by name, (outputs, inputs) or (experts, outputs, inputs)."""
    names = ("gate_up_proj", "down_proj") if isinstance(layer, Experts) else ("weight",)
    return {name: getattr(layer, name) for name in names}


def allocate_cached_weights(module: nn.Module) -> Iterator[CachedFloat8Weights]:
    """Yield memory for the weights in float8; one operation multiplies an input by several linear layers' weights."""
    parts = [part for part in module.modules() if isinstance(part, Float8Attention | Float8Mlp)]
    joint = [layers for part in parts if (layers := part.list_joint_layers())]
    yield from (CachedFloat8Weights([layer.weight for layer in layers]) for layers in joint)
    members = {id(layer) for layers in joint for layer in layers}
    for layer in module.modules():
        if isinstance(layer, Float8Linear) and id(layer) not in members and not isinstance(layer, StoredLayer):
            yield CachedFloat8Weights([layer.weight])
        elif isinstance(layer, Float8Experts):
            yield from (CachedFloat8Experts([weight]) for weight in (layer.gate_up_proj, layer.down_proj))


def count_bytes(cached: Sequence[CachedFloat8Weights]) -> int:
    """Return the bytes for elements, transposed elements and scales."""
    rows: list[Float8Rows] = [weights.rows for weights in cached]
    return sum(tensor.nbytes for tensors in rows for tensor in tensors)
