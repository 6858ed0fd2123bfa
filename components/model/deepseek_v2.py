"""The component `model.deepseek_v2`: DeepSeek-V2 and V2-Lite (arXiv 2405.04434)."""

from drawloom import component, setting
from drawloom.components.model.declarations import DecoderBuilder
from drawloom.components.model.deepseek_v3 import LatentConfig
from drawloom.ports import ConfigJson

GREEDY, GROUPED = "greedy", "group_limited_greedy"
"""Values of `topk_method` in files, without and with groups of experts."""


class DeepseekV2Config(LatentConfig):
    """Config of DeepSeek-V2: latent attention, and experts by softmax scores, which are not normalised."""

    norm_topk_prob = False
    best_in_group = 1

    n_shared_experts: int = 2
    mlp_bias: bool = setting("add biases to the linear layers of feed-forward networks", default=False)

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Convert greedy routing to a single group. Raises ValueError for other methods."""
        method = config.get("topk_method", GREEDY)
        if method not in (GREEDY, GROUPED):
            raise ValueError(f"says topk_method = {method!r}, where only {GREEDY} and {GROUPED} can be built")
        return config | ({"n_group": 1, "topk_group": 1} if method == GREEDY else {})

    @classmethod
    def write_keys(cls, config: ConfigJson) -> ConfigJson:
        """Add the topk_method for the number of groups."""
        return config | {"topk_method": GROUPED if config["n_group"] > 1 else GREEDY}


@component(impact="incompatible")
class DeepseekV2(DecoderBuilder):
    """
    A DeepSeek-V2 language model, with sizes from this table or a Hugging Face `config.json`.

    A load-balancing loss over the tokens of a row balances the experts.
    """

    config_type = DeepseekV2Config
    model_type = "deepseek_v2"
    class_name = "DeepseekV2ForCausalLM"
    hf_defaults = {"max_position_embeddings": 2048, "rope_theta": 1e4, "head_dim": 64}
    fixed = {"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1}
