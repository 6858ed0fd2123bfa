"""The two families of Qwen3 models, in our words and in Hugging Face's."""

from collections.abc import Mapping
from typing import Any

import attrs

from drawloom.components.model.qwen3.config import Qwen3Config, Qwen3MoeConfig

KEYS = {
    "num_hidden_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "initializer_range": "initializer_range",
}

EXPERT_KEYS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
    "decoder_sparse_step": "decoder_sparse_step",
    "mlp_only_layers": "mlp_only_layers",
    "router_aux_loss_coef": "router_aux_loss_coef",
}


@attrs.frozen
class Family:
    """
    A family: its component's name, its architecture, and how a `config.json` speaks of it.

    `keys` are our names and the config's. `needed` are settings that have no default; `silent` is what transformers
    takes where a config leaves a key out, as far as that is not our default.
    """

    component: str
    called: str
    architecture: type[Qwen3Config]
    model_type: str
    class_name: str
    keys: Mapping[str, str]
    needed: tuple[str, ...]
    hf_defaults: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def settings(self) -> list[str]:
        """The names of the settings that a config gives."""
        return [field.name for field in attrs.fields(self.architecture)]


DENSE = Family(
    "model.qwen3.dense",
    "a Qwen3 dense model",
    Qwen3Config,
    "qwen3",
    "Qwen3ForCausalLM",
    KEYS,
    needed=("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
)

MOE = Family(
    "model.qwen3.moe",
    "a Qwen3 model with experts",
    Qwen3MoeConfig,
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    KEYS | EXPERT_KEYS,
    needed=(
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    ),
    hf_defaults={"norm_topk_prob": False},
)
