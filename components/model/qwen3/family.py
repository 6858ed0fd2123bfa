"""The two families of Qwen3 models, in our words and in Hugging Face's."""

from collections.abc import Mapping
from typing import Any

import attrs

from drawloom.components.model.qwen3.config import Architecture, SparseArchitecture

KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "feed_forward": "intermediate_size",
    "vocabulary": "vocab_size",
    "tied": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "initial_std": "initializer_range",
}

EXPERT_KEYS = {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_feed_forward": "moe_intermediate_size",
    "normalised": "norm_topk_prob",
    "sparse_step": "decoder_sparse_step",
    "dense_layers": "mlp_only_layers",
    "balance": "router_aux_loss_coef",
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
    architecture: type[Architecture]
    model_type: str
    class_name: str
    keys: Mapping[str, str]
    needed: tuple[str, ...]
    silent: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def settings(self) -> list[str]:
        """The names of the settings that a config gives."""
        return [field.name for field in attrs.fields(self.architecture)]


DENSE = Family(
    "model.qwen3.dense",
    "a Qwen3 dense model",
    Architecture,
    "qwen3",
    "Qwen3ForCausalLM",
    KEYS,
    needed=("layers", "width", "heads", "feed_forward"),
)

SPARSE = Family(
    "model.qwen3.moe",
    "a Qwen3 model with experts",
    SparseArchitecture,
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    KEYS | EXPERT_KEYS,
    needed=("layers", "width", "heads", "experts", "experts_per_token", "expert_feed_forward"),
    silent={"normalised": False},
)
