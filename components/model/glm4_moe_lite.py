"""The component `model.glm4_moe_lite`: GLM-4.7-Flash."""

from drawloom import component
from drawloom.components.model.declarations import DecoderBuilder
from drawloom.components.model.deepseek_v3 import DeepseekV3Config
from drawloom.ports import ConfigJson


class Glm4MoeLiteConfig(DeepseekV3Config):
    """Config of DeepSeek-V3's layers whose files list the layers with experts."""

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Convert `mlp_layer_types` to `first_k_dense_replace`. Raises ValueError unless dense layers are first."""
        if (types := config.get("mlp_layer_types")) is None:
            return config
        dense = types.index("sparse") if "sparse" in types else 0
        if types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
            raise ValueError(f"says mlp_layer_types = {types}, where only dense layers before sparse ones can be built")
        return {**config, "first_k_dense_replace": dense}

    @classmethod
    def write_keys(cls, config: ConfigJson) -> ConfigJson:
        """Convert `first_k_dense_replace` to `mlp_layer_types`."""
        dense = config["first_k_dense_replace"]
        types = ["dense"] * dense + ["sparse"] * (config["num_hidden_layers"] - dense)
        return {**config, "mlp_layer_types": types}


@component(impact="incompatible")
class Glm4MoeLite(DecoderBuilder):
    """A GLM-4.7-Flash language model: DeepSeek-V3's layers with other sizes."""

    config_type = Glm4MoeLiteConfig
    model_type = "glm4_moe_lite"
    class_name = "Glm4MoeLiteForCausalLM"
    hf_defaults = {
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
    }
    has_classifier = False
