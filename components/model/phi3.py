"""The component `model.phi3`: Phi-3 (Abdin et al. 2024, arXiv 2404.14219), Phi-4 and Phi-4-mini (arXiv 2503.01743)."""

from collections.abc import Iterator

from drawloom import component
from drawloom.components.model.declarations import (
    DecoderBuilder,
    InvalidSetting,
    Join,
    WindowConfig,
    rotary_factor_setting,
)
from drawloom.ports import ConfigJson, Settings

EXPORTED_ROPES = ("default", "ntk", "longrope")
"""Values of rope_type whose exports transformers loads as a Phi-3 model."""


class Phi3Config(WindowConfig):
    """Config of Phi-3: like Llama, with a rotated part of each head, and an optional sliding window in all layers."""

    joins = (
        Join("qkv_proj.weight", "{}_proj.weight", "qkv"),
        Join("gate_up_proj.weight", "{}_proj.weight", ("gate", "up")),
    )

    max_position_embeddings: int = 4096
    rope_theta: float = 1e4
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = rotary_factor_setting(1.0)

    @classmethod
    def find_faults(cls, given: Settings) -> Iterator[InvalidSetting]:
        """Yield the inherited faults, and faults in scalings that transformers does not have for this family."""
        yield from super().find_faults(given)
        for key in ("rope_scaling", "rope_parameters"):
            if (rope := given.get(key)) and rope.rope_type not in EXPORTED_ROPES:
                why = f"{key}.rope_type = {rope.rope_type!r}, and transformers has only longrope for Phi-3"
                yield InvalidSetting((key, "rope_type"), why, 'write "longrope"')

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Rename rotary scaling `su` to `longrope`: the first files have the old name."""
        rope = config.get("rope_scaling")
        if rope and rope.get("type") == "su":
            config = {**config, "rope_scaling": {**rope, "type": "longrope"}}
        return config

    @classmethod
    def write_keys(cls, config: ConfigJson) -> ConfigJson:
        """
        Copy the original length from the rotary scaling to the top of a config, where transformers would use a default.
        """
        original = config.get("rope_parameters", {}).get("original_max_position_embeddings")
        return {**config, "original_max_position_embeddings": original or config["max_position_embeddings"]}


@component(impact="incompatible")
class Phi3(DecoderBuilder):
    """A Phi-3 or Phi-4 language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = Phi3Config
    model_type = "phi3"
    class_name = "Phi3ForCausalLM"
    hf_defaults = {"rope_theta": 1e4}
    fixed = {
        **dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.0),
        **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), False),
    }
