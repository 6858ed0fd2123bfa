"""The sizes of a decoder, dense or with experts, and which kinds of layers it has."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from drawloom.components.model.decoder.rope import InvalidSetting, RopeScaling
from drawloom.components.model.decoder.router import Routing
from drawloom.graph import between
from drawloom.graph.component import Bound

MAX_SIZES = {
    "num_hidden_layers": 10_000,  # ten times the deepest transformers; building many more would take hours
    "hidden_size": 10_000_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 1_000_000,
    "intermediate_size": 10_000_000,
    "moe_intermediate_size": 10_000_000,
    "max_position_embeddings": 1_000_000_000,
    "vocab_size": 2**31,  # token ids are int32
    "num_experts": 10_000,
    "num_experts_per_tok": 10_000,
    "n_shared_experts": 10_000,
}
"""Sizes above those of all models, beyond which checks alone would take minutes or gigabytes."""

MAX_EXPERTS_IN_ALL = 1_000_000
"""Experts of all layers: each is a tensor of its own in files."""


def size(name: str) -> Bound:
    """Return a check of a size of a model: from 1 to the greatest."""
    return between(1, MAX_SIZES[name] + 1)


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """
    All that is needed to build a decoder; sizes count channels, heads, layers or token ids.

    Fields are keys of `config.json`. What sets families apart, beyond sizes, are `qk_norm` and the methods, which a
    family's own class answers from its own keys.
    """

    qk_norm: ClassVar[bool] = False
    """Whether queries and keys are normed by head."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32_768
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    @property
    def longest_text(self) -> int:
        """The most tokens that rotary positions are made for: max_position_embeddings, or what scaling makes of it."""
        if self.rope_scaling is None or self.rope_scaling.factor is None:
            return self.max_position_embeddings
        # Files of Llama 3 have the extended length as max_position_embeddings, files of Qwen the original one.
        original = self.rope_scaling.original_max_position_embeddings or self.max_position_embeddings
        return max(self.max_position_embeddings, int(self.rope_scaling.factor * original))

    def has_bias(self, projection: str) -> bool:
        """Whether a linear layer, called as in transformers (`q_proj`), has a bias."""
        return False

    def window_of(self, layer: int) -> int | None:
        """How many tokens, itself included, a token of this layer attends to at most; None for all before it."""
        return None

    @classmethod
    def faults(cls, given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
        """What of a family's own is invalid among these values; those that have no default are given."""
        yield from ()


@attrs.frozen(kw_only=True)
class Qwen3Config(DecoderConfig):
    """Qwen3 (Qwen team 2025, arXiv 2505.09388): queries and keys are normed by head."""

    qk_norm: ClassVar[bool] = True


@attrs.frozen(kw_only=True)
class MoeConfig(DecoderConfig):
    """
    All that is needed to build a decoder with experts; which layers have some, and how they are chosen, is a family's.

    `router_aux_loss_coef` and `router_z_loss_coef` are coefficients of losses in training, each a mean over layers.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    router_aux_loss_coef: float = 0.001  # the default of transformers' MoeConfig
    router_z_loss_coef: float = 0.0

    @property
    def routing(self) -> Routing:
        """How experts are chosen."""
        return Routing()

    @classmethod
    def faults(cls, given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
        """More choices than experts, and more experts than files can hold."""
        if (every := given["num_hidden_layers"] * given["num_experts"]) > MAX_EXPERTS_IN_ALL:
            why = f"num_hidden_layers × num_experts = {every} experts are more than {MAX_EXPERTS_IN_ALL}"
            yield InvalidSetting("num_experts", why, "write fewer")
        elif (choices := given["num_experts_per_tok"]) > (experts := given["num_experts"]):
            why = f"num_experts_per_tok = {choices} is more than num_experts = {experts}"
            yield InvalidSetting("num_experts_per_tok", why, f"write {experts}, or less")

    def has_experts(self, number: int) -> bool:
        """Whether the layer of this number has experts."""
        return True

    @property
    def moe_layers(self) -> int:
        """The number of layers with experts."""
        return sum(map(self.has_experts, range(self.num_hidden_layers)))


@attrs.frozen(kw_only=True)
class Qwen3MoeConfig(MoeConfig):
    """Qwen3 with experts. `mlp_only_layers` are the numbers of layers without."""

    qk_norm: ClassVar[bool] = True

    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = attrs.field(default=(), converter=tuple)

    @property
    def routing(self) -> Routing:
        """By softmax."""
        return Routing(norm_topk_prob=self.norm_topk_prob)

    def has_experts(self, number: int) -> bool:
        """Whether a layer has experts: each `decoder_sparse_step`-th, without those in `mlp_only_layers`."""
        return has_experts(number, self.decoder_sparse_step, self.mlp_only_layers)

    @classmethod
    def faults(cls, given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
        """Invalid numbers of experts and layers; a layer without experts of no size."""
        yield from super().faults(given)
        layers, step = given["num_hidden_layers"], given.get("decoder_sparse_step", 1)
        dense = given.get("mlp_only_layers", ())
        if strange := [number for number in dense if not 0 <= number < layers]:
            why = f"mlp_only_layers names layer {strange[0]}, and layers are counted from 0 to {layers - 1}"
            yield InvalidSetting("mlp_only_layers", why, f"remove {strange[0]}")
        elif not any(has_experts(number, step, dense) for number in range(layers)):
            key = "decoder_sparse_step" if step > layers else "mlp_only_layers"
            yield InvalidSetting(key, "no layer has experts", 'write less, or use = "model.qwen3.dense"')
        else:
            yield from missing_size(given, [n for n in range(layers) if not has_experts(n, step, dense)])


def has_experts(number: int, sparse_step: int, dense_layers: Sequence[int]) -> bool:
    """Whether a layer has experts: the last of every `decoder_sparse_step` layers, unless it is in mlp_only_layers."""
    return number not in dense_layers and (number + 1) % sparse_step == 0


def head_faults(heads: int, kv_heads: int, head_dim: int) -> Iterator[InvalidSetting]:
    """Invalid combinations of the sizes of attention."""
    if heads % kv_heads:
        whole = [number for number in range(1, heads + 1) if heads % number == 0]
        why = f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}"
        yield InvalidSetting("num_key_value_heads", why, f"write one of {', '.join(map(str, whole))}")
    if head_dim % 2:
        why = f"head_dim = {head_dim} is odd, and rotary positions rotate pairs of channels"
        yield InvalidSetting("head_dim", why, f"write {head_dim + 1}")


def num_experts(architecture: DecoderConfig) -> int:
    """Return the number of experts of a layer; 0 if the model has no experts."""
    return architecture.num_experts if isinstance(architecture, MoeConfig) else 0


def tensor_faults(sizes: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Why ranks along `tensor` can't share a model with these sizes, as far as they are known."""
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (size := sizes.get(key)) and size % ranks:
            yield f"{key} = {size} does not divide by {ranks}"
    if (size := sizes.get("vocab_size")) and size < ranks:
        yield f"vocab_size = {size} is less than {ranks}"
    if "n_shared_experts" in sizes and (inner := sizes.get("moe_intermediate_size")):
        experts = sizes["n_shared_experts"] or 1
        if experts * inner % ranks:
            yield f"n_shared_experts × moe_intermediate_size = {experts * inner} does not divide by {ranks}"


def missing_size(given: Mapping[str, Any], dense: Sequence[int]) -> Iterator[InvalidSetting]:
    """The size of layers without experts, if there are such layers and no size."""
    if dense and "intermediate_size" not in given:
        why = f"intermediate_size is missing, and layer {dense[0]} has no experts"
        yield InvalidSetting("intermediate_size", why, "write intermediate_size = 768, for example")
