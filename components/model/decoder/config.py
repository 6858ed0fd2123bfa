"""Decoder configs: sizes, and every layer's specification."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs
import torch

from drawloom.components.model.decoder.rope import InvalidSetting, Rope, RopeScaling, convert_to_kernel_scaling
from drawloom.components.model.decoder.router import Routing
from drawloom.components.model.decoder.specs import (
    Activation,
    AttentionSpec,
    Branch,
    ExpertSpec,
    MixerSpec,
    MlpSpec,
)
from drawloom.components.model.decoder.values import (
    COEFFICIENT,
    LAYER_NUMBERS,
    create_word_list_check,
    declare_config_key,
)
from drawloom.graph import between
from drawloom.graph.component import Bound
from drawloom.kernels.attention_options import AttentionOptions

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


def create_size_check(name: str) -> Bound:
    """Return a check for the size setting `name`: from 1 to its entry in MAX_SIZES."""
    return between(1, MAX_SIZES[name] + 1)


# Without slots, as some families inherit from two configs.
@attrs.frozen(kw_only=True, slots=False)
class DecoderConfig:
    """
    Decoder config; sizes count channels, heads, layers or token ids.

    Fields are keys in `config.json`. Class variables and methods choose the layers' mechanisms; a family's own class
    overrides them.
    """

    qk_norm: ClassVar[Literal["none", "head", "projection"]] = "none"
    """RMSNorm of queries and keys: by head, or over the whole projection."""

    zero_centered: ClassVar[bool] = False
    """Whether norms multiply by 1 + weight."""

    activation: ClassVar[Activation] = "silu"
    """Activation of the gate in feed-forward networks."""

    residual_multiplier = 1.0
    """Factor of outputs that are added to the residual stream."""

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
    def max_sequence_length(self) -> int:
        """The maximum sequence length for rotary positions: max_position_embeddings, or more if they are scaled."""
        if self.rope_scaling is None or self.rope_scaling.factor is None:
            return self.max_position_embeddings
        # Files of Llama 3 have the extended length as max_position_embeddings, files of Qwen the original one.
        original = self.rope_scaling.original_max_position_embeddings or self.max_position_embeddings
        return max(self.max_position_embeddings, int(self.rope_scaling.factor * original))

    @property
    def rotary_dim(self) -> int:
        """The number of rotated channels in a head."""
        return self.head_dim

    @property
    def logit_multiplier(self) -> float:
        """The factor by which logits are multiplied."""
        return 1.0

    def embedding_multiplier_in(self, dtype: torch.dtype) -> float:
        """Return the factor by which embeddings are multiplied, rounded as a model in this dtype rounds it."""
        return 1.0

    @property
    def attention_score_scale(self) -> float | None:
        """The factor by which attention scores are multiplied; None: head_dim ** -0.5."""
        return None

    def has_bias(self, projection: str) -> bool:
        """Return whether a linear layer, called as in transformers (`q_proj`), has a bias."""
        return False

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a token attends to in a layer, itself included; None: all before it."""
        return None

    def rope_of(self, layer: int) -> Rope | None:
        """Return a layer's rotary positions; None: it has none."""
        return Rope(
            self.rotary_dim, self.rope_theta, convert_to_kernel_scaling(self.rope_scaling, self.max_position_embeddings)
        )

    def mixer_spec_of(self, layer: int) -> MixerSpec:
        """Return the specification for a layer's token mixer: attention, or a gated delta net."""
        return self.grouped_attention_spec_of(layer)

    def grouped_attention_spec_of(self, layer: int) -> AttentionSpec:
        """Return the specification for a layer's attention with grouped queries."""
        return AttentionSpec(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rope=self.rope_of(layer),
            window=self.window_of(layer),
            qk_norm=self.qk_norm,
            options=AttentionOptions(scale=self.attention_score_scale),
        )

    def mlp_spec_of(self, layer: int) -> MlpSpec | ExpertSpec:
        """Return the specification for a layer's feed-forward network or experts."""
        return MlpSpec(width=self.intermediate_size, activation=self.activation)

    def branches_of(self, layer: int) -> Sequence[Branch]:
        """Return a layer's branches, in order: here pre-norm attention and a pre-norm feed-forward network."""
        return (
            Branch("input_layernorm", "self_attn", self.mixer_spec_of(layer)),
            Branch("post_attention_layernorm", "mlp", self.mlp_spec_of(layer)),
        )

    @classmethod
    def find_faults(cls, given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
        """Yield the faults in keys only this family has; `given` has at least the keys without a default."""
        yield from ()


def post_norm_branches(config: DecoderConfig, layer: int) -> Sequence[Branch]:
    """Return attention and a feed-forward network, with their outputs normed instead of their inputs."""
    return (
        Branch(None, "self_attn", config.mixer_spec_of(layer), "post_attention_layernorm"),
        Branch(None, "mlp", config.mlp_spec_of(layer), "post_feedforward_layernorm"),
    )


FULL, SLIDING = "full_attention", "sliding_attention"


@attrs.frozen(kw_only=True)
class LayerTypesConfig(DecoderConfig):
    """
    Config with a type for every layer: full attention, or attention within `sliding_window` tokens.

    By default the last of every `full_attention_interval` layers has full attention. `layer_types` may be longer than
    the model.
    """

    full_attention_interval: ClassVar[int] = 4

    sliding_window: int = 4096
    layer_types: tuple[str, ...] = attrs.field(
        default=attrs.Factory(lambda self: self.default_layer_types(self.num_hidden_layers), takes_self=True),
        converter=tuple,
        metadata={"values": create_word_list_check(FULL, SLIDING)},
    )

    @classmethod
    def default_layer_types(cls, layers: int, interval: int | None = None) -> tuple[str, ...]:
        """Return types for `layers` layers: every `interval`-th (default: the family's) has full attention."""
        step = interval or cls.full_attention_interval
        return tuple(SLIDING if (layer + 1) % step else FULL for layer in range(layers))

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def find_faults(cls, given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
        """Yield the inherited faults, and one if `layer_types` is shorter than the model or has an unknown type."""
        yield from super().find_faults(given)
        layers, types = given["num_hidden_layers"], given.get("layer_types")
        if types is not None and len(types) < layers:
            why = f"layer_types has {len(types)} types, and num_hidden_layers = {layers}"
            yield InvalidSetting("layer_types", why, f"write {layers} types, or leave layer_types out")
        elif types is not None and (unknown := [word for word in types if word not in (FULL, SLIDING)]):
            why = f"layer_types has {unknown[0]!r}"
            yield InvalidSetting("layer_types", why, f"write {FULL!r} or {SLIDING!r}")


@attrs.frozen(kw_only=True)
class Qwen3Config(DecoderConfig):
    """Config of Qwen3 (Qwen team 2025, arXiv 2505.09388): queries and keys are normed by head."""

    qk_norm = "head"


@attrs.frozen(kw_only=True, slots=False)
class MoeConfig(DecoderConfig):
    """
    Config for a decoder with experts. A family decides which layers have experts, and how they are chosen.

    `router_aux_loss_coef` and `router_z_loss_coef` are loss coefficients in training; both losses are means over
    layers.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    router_aux_loss_coef: float = declare_config_key(COEFFICIENT, 0.001)  # the default of transformers' MoeConfig
    router_z_loss_coef: float = declare_config_key(COEFFICIENT, 0.0)

    @property
    def routing(self) -> Routing:
        """The router's choice of experts: by softmax and top k, unless a family overrides this."""
        return Routing()

    @property
    def shared_expert_width(self) -> int:
        """The inner width for experts that all tokens visit."""
        return 0

    def mlp_spec_of(self, layer: int) -> MlpSpec | ExpertSpec:
        if not self.layer_has_experts(layer):
            return super().mlp_spec_of(layer)
        return ExpertSpec(
            experts=self.num_experts,
            choices=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            routing=self.routing,
            shared_expert_width=self.shared_expert_width,
            aux_loss_coef=self.router_aux_loss_coef / self.moe_layers,
            z_loss_coef=self.router_z_loss_coef / self.moe_layers,
        )

    @classmethod
    def find_faults(cls, given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
        yield from super().find_faults(given)
        yield from find_expert_count_faults(given)

    def layer_has_experts(self, number: int) -> bool:
        """Return True: all layers have experts, unless a subclass overrides this."""
        return True

    @property
    def moe_layers(self) -> int:
        """The number of layers with experts."""
        return sum(map(self.layer_has_experts, range(self.num_hidden_layers)))


@attrs.frozen(kw_only=True, slots=False)
class Qwen3MoeConfig(MoeConfig):
    """Config of Qwen3 with experts. `mlp_only_layers` numbers the layers without experts."""

    qk_norm = "head"

    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = declare_config_key(LAYER_NUMBERS, ())

    @property
    def routing(self) -> Routing:
        """Routing by softmax scores."""
        return Routing(norm_topk_prob=self.norm_topk_prob)

    def layer_has_experts(self, number: int) -> bool:
        return layer_has_experts(number, self.decoder_sparse_step, self.mlp_only_layers)

    @classmethod
    def find_faults(cls, given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
        """Yield the faults in layer numbers, and the fault if a layer without experts has no size."""
        yield from super().find_faults(given)
        layers, step = given["num_hidden_layers"], given.get("decoder_sparse_step", 1)
        dense = given.get("mlp_only_layers", ())
        if strange := [number for number in dense if not 0 <= number < layers]:
            why = f"mlp_only_layers names layer {strange[0]}, and layers are counted from 0 to {layers - 1}"
            yield InvalidSetting("mlp_only_layers", why, f"remove {strange[0]}")
        elif not any(layer_has_experts(number, step, dense) for number in range(layers)):
            key = "decoder_sparse_step" if step > layers else "mlp_only_layers"
            yield InvalidSetting(key, "no layer has experts", 'write less, or use = "model.qwen3.dense"')
        else:
            yield from find_dense_width_faults(
                given, [n for n in range(layers) if not layer_has_experts(n, step, dense)]
            )


def layer_has_experts(number: int, sparse_step: int, dense_layers: Sequence[int]) -> bool:
    """Return whether layer `number` has experts: every `sparse_step`-th layer has, except for `dense_layers`."""
    return number not in dense_layers and (number + 1) % sparse_step == 0


def find_head_count_faults(heads: int, kv_heads: int, head_dim: int) -> Iterator[InvalidSetting]:
    """Yield the faults if kv_heads does not divide heads, or head_dim is odd."""
    if heads % kv_heads:
        whole = [number for number in range(1, heads + 1) if heads % number == 0]
        why = f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}"
        yield InvalidSetting("num_key_value_heads", why, f"write one of {', '.join(map(str, whole))}")
    if head_dim % 2:
        why = f"head_dim = {head_dim} is odd, and rotary positions rotate pairs of channels"
        yield InvalidSetting("head_dim", why, f"write {head_dim + 1}")


def find_expert_count_faults(given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
    """Yield the fault if a token chooses more experts than there are, or there are more than files can contain."""
    if (total := given["num_hidden_layers"] * given["num_experts"]) > MAX_EXPERTS_IN_ALL:
        why = f"num_hidden_layers × num_experts = {total} experts are more than {MAX_EXPERTS_IN_ALL}"
        yield InvalidSetting("num_experts", why, "write fewer")
    elif (choices := given["num_experts_per_tok"]) > (experts := given["num_experts"]):
        why = f"num_experts_per_tok = {choices} is more than num_experts = {experts}"
        yield InvalidSetting("num_experts_per_tok", why, f"write {experts}, or less")


def find_rotary_dim_faults(given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
    """Yield the fault if a head's rotated channels do not form pairs."""
    if "head_dim" in given:
        channels = int(given["head_dim"] * given["partial_rotary_factor"])
        if channels < 2 or channels % 2:
            head = f"head_dim = {given['head_dim']}"
            why = f"partial_rotary_factor = {given['partial_rotary_factor']} rotates {channels} channels of {head}"
            yield InvalidSetting("partial_rotary_factor", why, "write a factor that rotates pairs of channels")


def num_experts(architecture: DecoderConfig) -> int:
    """Return the number of experts in a layer; 0 if the model has none."""
    layers = range(architecture.num_hidden_layers)
    specs = (branch.spec for layer in layers for branch in architecture.branches_of(layer))
    return next((spec.experts for spec in specs if isinstance(spec, ExpertSpec)), 0)


def find_tensor_parallel_faults(sizes: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Yield the reasons why `ranks` ranks along `tensor` can't share a model with these sizes."""
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (size := sizes.get(key)) and size % ranks:
            yield f"{key} = {size} is not divisible by {ranks}"
    if (size := sizes.get("vocab_size")) and size < ranks:
        yield f"vocab_size = {size} is less than {ranks}"
    if "n_shared_experts" in sizes and (inner := sizes.get("moe_intermediate_size")):
        experts = sizes["n_shared_experts"] or 1
        if experts * inner % ranks:
            yield f"n_shared_experts × moe_intermediate_size = {experts * inner} is not divisible by {ranks}"


def find_dense_width_faults(given: Mapping[str, Any], dense: Sequence[int]) -> Iterator[InvalidSetting]:
    """Yield the fault if intermediate_size is missing although the layers `dense` have no experts."""
    if dense and "intermediate_size" not in given:
        why = f"intermediate_size is missing, and layer {dense[0]} has no experts"
        yield InvalidSetting("intermediate_size", why, "write intermediate_size = 768, for example")
