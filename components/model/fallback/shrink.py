"""Shrunken configs of transformers' models: all flags are kept, and sizes become small."""

from collections.abc import Mapping
from typing import Any

MAX_LAYERS = 6
WINDOW = 4
WIDTH = 48

SMALL = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "sliding_window": WINDOW,
    "attention_chunk_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
"""Maximum values of sizes; a smaller value, zero and None stay."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict of a smaller model's config with the same flags and kinds of layers."""
    small = {key: _shrink_value(key, value) for key, value in config.items()}
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and heads > 0:
        width = config["hidden_size"] // heads
        if config.get("head_dim") in (None, width) and "qk_nope_head_dim" not in config:
            # The width of heads stays, because tables of rotary positions have its length.
            small["hidden_size"] = small["num_attention_heads"] * width
        if isinstance(kv_heads, int):
            small["num_key_value_heads"] = _shrink_kv_heads(heads, kv_heads, small["num_attention_heads"])
    if config.get("head_dim") and "qk_rope_head_dim" in small:
        small["head_dim"] = min(config["head_dim"], small["qk_rope_head_dim"])  # the width that is rotated
    if (head_dim := config.get("qk_head_dim")) is not None and "qk_nope_head_dim" in config:
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"] if head_dim else head_dim
    return small | _shrink_layers(config)


def _shrink_value(key: str, value: Any) -> Any:
    if key.endswith("_token_id"):
        # Embeddings have no gradients for padding.
        return None if key == "pad_token_id" else [1] if isinstance(value, list) else value and 1
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if "intermediate_size" in key:
        return min(value, WIDTH)
    if key in EXPERT_COUNTS:
        return min(value, 4)
    return min(value, SMALL[key]) if key in SMALL else value


def _shrink_kv_heads(heads: int, kv_heads: int, small_heads: int) -> int:
    if kv_heads in (1, heads):
        return 1 if kv_heads == 1 else small_heads
    return max(1, small_heads // 2)


def _shrink_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of layers, and the lists with an element for each layer."""
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):
        return {}
    by_layer = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == layers}
    count = min(layers, MAX_LAYERS if by_layer else 4)
    return {"num_hidden_layers": count} | {key: value[:count] for key, value in by_layer.items()}
