"""The component `model.minimax_m2`: MiniMax M2 (MiniMax 2025)."""

from drawloom import component
from drawloom.components.model.decoder.declarations import DecoderBuilder, Family, config_class, rotary_factor_setting
from drawloom.components.model.decoder.expert_config import ExpertsConfig
from drawloom.components.model.decoder.expert_specs import Routing
from drawloom.components.model.decoder.tensor_names import MIXTRAL_EXPERTS, rename_tensors
from drawloom.ports import ConfigJson


@config_class
class MiniMaxM2Config(ExpertsConfig):
    """Config of MiniMax M2: norms of whole queries and keys, a rotated part of heads, and sigmoid routers."""

    qk_norm = "projection"

    rope_theta: float = 5e6
    partial_rotary_factor: float = rotary_factor_setting(0.5)

    @property
    def routing(self) -> Routing:
        """Routing by sigmoid scores, with a balancing bias."""
        return Routing(scoring_func="sigmoid", bias=True)


def _convert_config_from_hf(config: ConfigJson) -> ConfigJson:
    """Convert `rotary_dim` of published configs to a part of the head's channels."""
    channels, width = config.get("rotary_dim"), config.get("head_dim", 128)
    if type(channels) is int and type(width) is int and width:
        config = {"partial_rotary_factor": channels / width, **config}
    return config


@component(impact="incompatible")
class MiniMaxM2(DecoderBuilder):
    """A MiniMax M2 language model, with sizes from this table or a Hugging Face `config.json`."""

    family = Family(
        MiniMaxM2Config,
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        hf_defaults={
            "max_position_embeddings": 196_608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "partial_rotary_factor": 1.0,
            "rope_theta": 5e6,
        },
        fixed={"router_jitter_noise": 0.0},
        renamed={"num_experts": "num_local_experts"},
        derives_head_dim=False,
        read=_convert_config_from_hf,
        mapper=rename_tensors({**MIXTRAL_EXPERTS, r"\.gate\.e_score_correction_bias$": ".e_score_correction_bias"}),
        has_classifier=False,
    )
