"""The component `model.gpt_oss`: gpt-oss 20B and 120B (OpenAI 2025, arXiv 2508.10925)."""

from drawloom import above, component, setting
from drawloom.components.model.declarations import (
    ATTENTION_BIAS,
    ClampedSwiGlu,
    DecoderBuilder,
    ExpertsConfig,
    LayerTypesConfig,
    SlidingTypes,
    chunk,
    concatenate_blocks,
    layer_types_setting,
    sequential,
    training_setting,
    transpose,
)
from drawloom.ports import ConfigJson, Mapper


class GptOssConfig(LayerTypesConfig, ExpertsConfig):
    """Config of gpt-oss: attention sinks, windows in every other layer, and experts with biases and bounds."""

    renamed = {"num_experts": "num_local_experts"}
    attention_sinks = True
    router_name = "router"
    router_bias = True
    expert_biases = True

    rope_theta: float = 150_000.0
    rms_norm_eps: float = 1e-5
    sliding_window: int = 128
    layer_types: SlidingTypes = layer_types_setting(2)
    attention_bias: bool = setting(ATTENTION_BIAS, default=True)
    swiglu_alpha: float = training_setting("slope of the experts' gate", default=1.702, check=above(0))
    swiglu_limit: float = training_setting("bound of the experts' inner values", default=7.0, check=above(0))

    @property
    def activation(self) -> ClampedSwiGlu:  # type: ignore[override]
        return ClampedSwiGlu(self.swiglu_alpha, self.swiglu_limit)

    def map_experts(self, name: str) -> Mapper | None:
        """Return the mapper for an expert parameter: matrices are transposed, gate and up alternate by row."""
        if name.endswith((".experts.gate_up_proj", ".experts.gate_up_proj_bias")):
            halves = [f"{name}.{half}" for half in ("gate", "up")]
            joined = concatenate_blocks(halves, name, self.intermediate_size, [1, 1], dim=1)
            transposed = () if name.endswith("_bias") else (transpose(name, 1, 2),)
            return sequential(chunk(name, halves, 1), joined, *transposed)
        return transpose(name, 1, 2) if name.endswith(".experts.down_proj") else None

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Add transformers' default rotary scaling to a config without one."""
        if config.get("rope_scaling") or config.get("rope_parameters"):
            return config
        yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
        return {"rope_theta": 150_000.0, **config, "rope_parameters": yarn}

    @classmethod
    def write_keys(cls, config: ConfigJson) -> ConfigJson:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}, **config}


@component(impact="incompatible")
class GptOss(DecoderBuilder):
    """
    A gpt-oss language model, with sizes from this table or a Hugging Face `config.json`.

    Experts in MXFP4 are read as bfloat16, and exported so.
    """

    config_type = GptOssConfig
    model_type = "gpt_oss"
    class_name = "GptOssForCausalLM"
    hf_defaults = {"max_position_embeddings": 131_072, "head_dim": 64, "num_key_value_heads": 8}
