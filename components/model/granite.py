"""The component `model.granite`: Granite 3 and later dense models (IBM 2024)."""

from functools import cached_property
from typing import Any

import attrs

from drawloom import above, component
from drawloom.components.model.declarations import (
    ParametrizedBuilder,
    training_setting,
)
from drawloom.components.model.llama import LlamaConfig


class GraniteConfig(LlamaConfig):
    """Config of Granite: Llama with factors for embeddings, attention scores, residual outputs and logits."""

    rope_theta: float = 1e4
    embedding_multiplier: float = training_setting("factor of embeddings", default=1.0, check=above(0))
    attention_multiplier: float = training_setting("factor of attention scores", default=1.0, check=above(0))
    residual_multiplier: float = training_setting(
        "factor of the outputs of attention and feed-forward networks", default=1.0, check=above(0)
    )
    logits_scaling: float = training_setting("divisor of logits", default=1.0, check=above(0))

    @property
    def attention_score_scale(self) -> float:  # type: ignore[override]
        return self.attention_multiplier

    @property
    def logit_multiplier(self) -> float:  # type: ignore[override]
        return 1 / self.logits_scaling


@component(impact="incompatible")
class Granite(ParametrizedBuilder):
    """A Granite language model, with sizes from this table or a Hugging Face `config.json`."""

    config_type = GraniteConfig
    model_type = "granite"
    class_name = "GraniteForCausalLM"
    hf_defaults = {"max_position_embeddings": 2048, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
    has_classifier = False
    has_multipliers = True

    @cached_property
    def architecture(self) -> Any:
        """The config with the parametrization's multipliers."""
        config: Any = super().architecture
        scaling = self.compute_scaling(config)
        return attrs.evolve(
            config,
            residual_multiplier=config.residual_multiplier * scaling.residual_multiplier,
            logits_scaling=config.logits_scaling / scaling.logit_multiplier,  # a divisor
        )
