"""The component `model.minimax_m2`: MiniMax M2 (MiniMax 2025)."""

from drawloom import component
from drawloom.components.model.declarations import (
    MIXTRAL_EXPERTS,
    DecoderBuilder,
    ExpertsConfig,
    rotary_factor_setting,
)
from drawloom.ports import ConfigJson


class MiniMaxM2Config(ExpertsConfig):
    """Config of MiniMax M2: norms of whole queries and keys, a rotated part of heads, and sigmoid routers."""

    qk_norm = "projection"
    renamed = {"num_experts": "num_local_experts"}
    renamed_tensors = {**MIXTRAL_EXPERTS, r"\.gate\.e_score_correction_bias$": ".e_score_correction_bias"}
    renamed_modules = {r"\.block_sparse_moe\.": ".mlp."}
    scoring_func = "sigmoid"
    balancing_bias = True

    rope_theta: float = 5e6
    partial_rotary_factor: float = rotary_factor_setting(0.5)

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Convert `rotary_dim` of published configs to a part of the head's channels."""
        channels, width = config.get("rotary_dim"), config.get("head_dim", 128)
        if channels and width:
            config = {"partial_rotary_factor": channels / width, **config}
        return config


@component(impact="incompatible")
class MiniMaxM2(DecoderBuilder):
    """A MiniMax M2 language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = MiniMaxM2Config
    model_type = "minimax_m2"
    class_name = "MiniMaxM2ForCausalLM"
    hf_defaults = {
        "max_position_embeddings": 196_608,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 1.0,
        "rope_theta": 5e6,
    }
    fixed = {"router_jitter_noise": 0.0}
    has_classifier = False
