"""The component `model.olmo3`: OLMo 3 (OLMo team 2025, arXiv 2512.13961)."""

from drawloom import component
from drawloom.components.model.declarations import DecoderBuilder, RopeByTypeConfig
from drawloom.components.model.olmo2 import Olmo2Config
from drawloom.ports import ConfigJson

THETA = 5e5


class Olmo3Config(RopeByTypeConfig, Olmo2Config):
    """Config of OLMo 3: OLMo 2 with three layers with a window to one without, whose positions alone are scaled."""

    default_sliding_theta = THETA

    max_position_embeddings: int = 8192
    rope_theta: float = THETA

    @classmethod
    def read_keys(cls, config: ConfigJson) -> ConfigJson:
        """Replace the rotary bases by layer type by a single base. Raises ValueError if they differ."""
        config = super().read_keys(config)
        full = config.get("rope_parameters") or {}
        theta = full.get("rope_theta", config.get("rope_theta", THETA))
        if (sliding := config.get("sliding_theta", theta)) != theta:
            raise ValueError(
                f"has rope_theta = {sliding} for sliding and {theta} for full attention; only equal ones can be built"
            )
        return config


@component(impact="incompatible")
class Olmo3(DecoderBuilder):
    """An OLMo 3 language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = Olmo3Config
    model_type = "olmo3"
    class_name = "Olmo3ForCausalLM"
    hf_defaults = {"max_position_embeddings": 2048, "rope_theta": THETA, "rms_norm_eps": 1e-5}
