"""The component `model.deepseek_v2`: DeepSeek-V2 and V2-Lite (arXiv 2405.04434)."""

from drawloom import component, setting
from drawloom.components.model.decoder.declarations import DecoderBuilder, Family, config_class
from drawloom.components.model.decoder.expert_specs import Routing
from drawloom.components.model.deepseek_v3 import LATENT_RENAMED, LatentConfig, read_latent_config, write_latent_config
from drawloom.ports import ConfigJson

GREEDY, GROUPED = "greedy", "group_limited_greedy"
"""Values of `topk_method` in files, without and with groups of experts."""


@config_class
class DeepseekV2Config(LatentConfig):
    """Config of DeepSeek-V2: latent attention, and experts by softmax scores, which are not normalised."""

    n_shared_experts: int = 2
    mlp_bias: bool = setting("add biases to the linear layers of feed-forward networks", default=False)

    @property
    def routing(self) -> Routing:
        """Routing by softmax scores, with float32 logits, within the groups with the best experts."""
        return Routing(
            norm_topk_prob=False,
            routed_scaling_factor=self.routed_scaling_factor,
            n_group=self.n_group,
            topk_group=self.topk_group,
            best_in_group=1,
            wide_logits=True,
        )


def _convert_config_from_hf(config: ConfigJson) -> ConfigJson:
    """Convert a `config.json`; greedy routing becomes one group of experts. Raises ValueError for other methods."""
    method = config.get("topk_method", GREEDY)
    if method not in (GREEDY, GROUPED):
        raise ValueError(f"says topk_method = {method!r}, where only {GREEDY} and {GROUPED} can be built")
    return read_latent_config(config) | ({"n_group": 1, "topk_group": 1} if method == GREEDY else {})


def _convert_config_to_hf(config: ConfigJson) -> ConfigJson:
    """Convert a `q_lora_rank` of 0 to null, and add the topk_method for the number of groups."""
    return write_latent_config(config) | {"topk_method": GROUPED if config["n_group"] > 1 else GREEDY}


@component(impact="incompatible")
class DeepseekV2(DecoderBuilder):
    """
    A DeepSeek-V2 language model, with sizes from this table or a Hugging Face `config.json`.

    A load-balancing loss over the tokens of a row balances the experts.
    """

    family = Family(
        DeepseekV2Config,
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        hf_defaults={"max_position_embeddings": 2048, "rope_theta": 1e4, "head_dim": 64},
        fixed={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
        renamed=LATENT_RENAMED,
        read=_convert_config_from_hf,
        write=_convert_config_to_hf,
    )
