"""The component `model.deepseek_v3`: DeepSeek-V3 (arXiv 2412.19437), Moonlight, Kimi K2 and K2.5 for text."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from drawloom.components.model.decoder.config import MAX_SIZES, create_size_check
from drawloom.components.model.decoder.grouped_experts import (
    RENAMED,
    GroupedExpertsBuilder,
    GroupedExpertsConfig,
    SigmoidExpertsBuilder,
    SigmoidExpertsConfig,
)
from drawloom.components.model.decoder.hugging_face import Family
from drawloom.components.model.decoder.rope import InvalidSetting, Rope, latent_score_multiplier
from drawloom.components.model.decoder.specs import LatentSpec
from drawloom.components.model.decoder.values import COUNT, declare_config_key
from drawloom.components.model.qwen3.moe import MOE
from drawloom.graph import between, component, component_base_class, setting
from drawloom.kernels.attention_options import AttentionOptions


@attrs.frozen(kw_only=True, slots=False)
class LatentConfig(GroupedExpertsConfig):
    """
    Config for multi-head latent attention and grouped experts.

    `head_dim` is the number of rotated channels, which files call qk_rope_head_dim. With `q_lora_rank` 0,
    queries are projected from hidden states.
    """

    rope_interleave = True

    q_lora_rank: int = declare_config_key(COUNT, 1536)
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    attention_bias: bool = False

    def has_bias(self, projection: str) -> bool:
        return self.attention_bias and projection in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")

    def rope_of(self, layer: int) -> Rope | None:
        rope = super().rope_of(layer)
        return rope and attrs.evolve(rope, interleaved=self.rope_interleave)

    def mixer_spec_of(self, layer: int) -> LatentSpec:
        scale = (self.qk_nope_head_dim + self.head_dim) ** -0.5 * latent_score_multiplier(self.rope_scaling)
        return LatentSpec(
            heads=self.num_attention_heads,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=self.head_dim,
            v_dim=self.v_head_dim,
            kv_rank=self.kv_lora_rank,
            query_rank=self.q_lora_rank or None,
            rope=self.rope_of(layer),
            options=AttentionOptions(scale=scale),
        )

    @classmethod
    def find_faults(cls, given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
        """
        Yield the inherited faults, and one if the number of key heads is not the number of query heads.

        Latent attention has equally many of both.
        """
        yield from super().find_faults(given)
        heads = given["num_attention_heads"]
        if (kv_heads := given.get("num_key_value_heads", heads)) != heads:
            why = f"num_key_value_heads = {kv_heads}, and latent attention has num_attention_heads = {heads}"
            yield InvalidSetting("num_key_value_heads", why, "leave it out")


@attrs.frozen(kw_only=True)
class DeepseekV3Config(LatentConfig, SigmoidExpertsConfig):
    """Config of DeepSeek-V3. Without `rope_interleave`, halves of channels are rotated instead of adjacent pairs."""

    rope_interleave: bool = True


def convert_null_q_lora_rank_to_zero(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose `q_lora_rank` is 0 instead of null, because recipes have no null."""
    return {**config, "q_lora_rank": config["q_lora_rank"] or 0} if "q_lora_rank" in config else config


def convert_zero_q_lora_rank_to_null(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose `q_lora_rank` is null instead of 0."""
    return {**config, "q_lora_rank": config["q_lora_rank"] or None}


def _convert_layer_types_to_dense_count(config: dict[str, Any]) -> dict[str, Any]:
    """Convert `mlp_layer_types` to `first_k_dense_replace`. Raises ValueError unless dense layers are first."""
    config, types = convert_null_q_lora_rank_to_zero(config), config.get("mlp_layer_types")
    if types is None:
        return config
    dense = types.index("sparse") if isinstance(types, list) and "sparse" in types else 0
    if types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
        raise ValueError(f"says mlp_layer_types = {types}, where only dense layers before sparse ones can be built")
    return {**config, "first_k_dense_replace": dense}


def _convert_dense_count_to_layer_types(config: dict[str, Any]) -> dict[str, Any]:
    """Convert `first_k_dense_replace` to `mlp_layer_types`, as in GLM-4.7-Flash's files."""
    dense = config["first_k_dense_replace"]
    types = ["dense"] * dense + ["sparse"] * (config["num_hidden_layers"] - dense)
    return {**convert_zero_q_lora_rank_to_null(config), "mlp_layer_types": types}


MTP = "model.layers.{layers}.*"
"""The layer for multi-token prediction, which is not trained."""

DEEPSEEK_V3 = Family(
    "model.deepseek_v3",
    "a DeepSeek-V3 model",
    DeepseekV3Config,
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    needed=MOE.needed,
    hf_defaults={
        "max_position_embeddings": 4096,
        "rope_theta": 1e4,
        "head_dim": 64,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "num_experts_per_tok": 8,
    },
    read=convert_null_q_lora_rank_to_zero,
    write=convert_zero_q_lora_rank_to_null,
    renamed=RENAMED | {"head_dim": "qk_rope_head_dim"},
    other_types=("kimi_k2",),
    nested_types={"kimi_k25": "model.language_model."},
    ignored=(
        "model.layers.{layers}.*",
        "vision_tower.*",
        "mm_projector.*",
        "model.vision_tower.*",
        "model.mm_projector.*",
    ),
)

GLM4_MOE_LITE = attrs.evolve(
    DEEPSEEK_V3,
    component="model.glm4_moe_lite",
    called="a GLM-4.7-Flash model",
    model_type="glm4_moe_lite",
    class_name="Glm4MoeLiteForCausalLM",
    has_classifier=False,
    hf_defaults={
        "max_position_embeddings": 202_752,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "routed_scaling_factor": 1.8,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
    },
    other_types=(),
    nested_types={},
    ignored=(MTP,),
    read=_convert_layer_types_to_dense_count,
    write=_convert_dense_count_to_layer_types,
)


@component_base_class
class LatentBuilder(GroupedExpertsBuilder):
    """Builder for a decoder with latent attention."""

    head_dim: int | None = setting(
        default=None,
        check=create_size_check("head_dim"),
        doc="rotated channels of queries, and of the key that all heads share (qk_rope_head_dim in files); default: "
        "hidden_size / num_attention_heads",
    )
    qk_nope_head_dim: int | None = setting(
        default=None,
        check=create_size_check("head_dim"),
        doc="channels of queries and keys without rotation; default: 128",
    )
    v_head_dim: int | None = setting(
        default=None, check=create_size_check("head_dim"), doc="width of values; default: 128"
    )
    kv_lora_rank: int | None = setting(
        default=None, check=create_size_check("hidden_size"), doc="width of the latent of keys and values; default: 512"
    )
    q_lora_rank: int | None = setting(
        default=None,
        check=between(0, MAX_SIZES["hidden_size"] + 1),
        doc="width of the latent of queries, or 0 to project them from hidden states; default: 1536",
    )
    attention_bias: bool | None = setting(
        default=None, doc="add biases to the projections to latents and to the output; default: false"
    )


@component(impact="incompatible")
class DeepseekV3(LatentBuilder, SigmoidExpertsBuilder):
    """
    A DeepSeek-V3 language model, with sizes from this table or a Hugging Face `config.json`.

    Moonlight, Kimi K2 and the text model of Kimi K2.5 are of this family, too.
    """

    family = DEEPSEEK_V3

    rope_interleave: bool | None = setting(
        default=None,
        impact="changes_training",
        doc="rotate pairs of adjacent channels instead of pairs of halves; default: true",
    )
