"""The component `model.deepseek_v3`: DeepSeek-V3 (arXiv 2412.19437), Moonlight, Kimi K2 and K2.5 for text."""

from collections.abc import Iterator

from drawloom import component, setting
from drawloom.components.model.declarations import (
    DecoderBuilder,
    GroupedExpertsConfig,
    InvalidSetting,
    LatentSpec,
    SigmoidExpertsConfig,
    latent_score_multiplier,
    size_setting,
    training_setting,
)
from drawloom.ports import AttentionOptions, Settings


class LatentConfig(GroupedExpertsConfig):
    """
    Config for multi-head latent attention and grouped experts.

    `head_dim` is the number of rotated channels, which files call qk_rope_head_dim. With `q_lora_rank` 0,
    queries are projected from hidden states.
    """

    renamed = GroupedExpertsConfig.renamed | {"head_dim": "qk_rope_head_dim"}
    zero_is_null = ("q_lora_rank",)
    rope_interleave = True

    head_dim: int = size_setting(
        "head_dim",
        "rotated channels of queries, and of the key that all heads share (qk_rope_head_dim in files); default: "
        "hidden_size / num_attention_heads",
    )
    qk_nope_head_dim: int = size_setting("head_dim", "channels of queries and keys without rotation", default=128)
    v_head_dim: int = size_setting("head_dim", "width of values", default=128)
    kv_lora_rank: int = size_setting("hidden_size", "width of the latent of keys and values", default=512)
    q_lora_rank: int = size_setting(
        "hidden_size", "width of the latent of queries, or 0 to project them from hidden states", 0, default=1536
    )
    attention_bias: bool = setting("add biases to the projections to latents and to the output", default=False)

    def mixer_spec_of(self, layer: int) -> LatentSpec:
        scale = (self.qk_nope_head_dim + self.head_dim) ** -0.5 * latent_score_multiplier(self.rope_scaling)
        return LatentSpec.from_config(
            self,
            rope_dim=self.head_dim,
            rope=self.rope_of(layer),
            options=AttentionOptions(scale=scale),
        )

    @classmethod
    def find_faults(cls, given: Settings) -> Iterator[InvalidSetting]:
        """
        Yield the inherited faults, and one if the number of key heads is not the number of query heads.

        Latent attention has equally many of both.
        """
        yield from super().find_faults(given)
        heads, kv_heads = given["num_attention_heads"], given["num_key_value_heads"]
        if kv_heads != heads:
            why = f"num_key_value_heads = {kv_heads}, and latent attention has num_attention_heads = {heads}"
            yield InvalidSetting("num_key_value_heads", why, "leave it out")


class DeepseekV3Config(LatentConfig, SigmoidExpertsConfig):
    """Config of DeepSeek-V3. Without `rope_interleave`, halves of channels are rotated instead of adjacent pairs."""

    rope_interleave: bool = training_setting(
        "rotate pairs of adjacent channels instead of pairs of halves", default=True
    )


@component(impact="incompatible")
class DeepseekV3(DecoderBuilder):
    """
    A DeepSeek-V3 language model, with sizes from this table or a Hugging Face `config.json`.

    Moonlight, Kimi K2 and the text model of Kimi K2.5 are of this family, too.
    """

    config_type = DeepseekV3Config
    model_type = "deepseek_v3"
    class_name = "DeepseekV3ForCausalLM"
    hf_defaults = {
        "max_position_embeddings": 4096,
        "rope_theta": 1e4,
        "head_dim": 64,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "num_experts_per_tok": 8,
    }
    other_types = ("kimi_k2",)
    nested_types = {"kimi_k25": "model.language_model."}
    ignored = ("*vision_tower.*", "*mm_projector.*")
