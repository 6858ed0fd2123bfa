"""Shrunken configs of transformers' models: all flags are kept, and sizes become small."""

from collections.abc import Mapping
from typing import Any

MAX_LAYERS = 6
WINDOW = 4
WIDTH = 48
WIDE_HEAD = 256

SMALL = {
    "vocab_size": 61,
    "hidden_size": 64,
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
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Maximum values of sizes; a smaller value, zero and None stay."""

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
"""Sizes that have other keys in some families: `n_embd`."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def shrink_config(config: Any) -> Any:
    """Return the transformers config of a smaller model with the same flags and kinds of layers."""
    attribute_map: Mapping[str, str] = config.attribute_map
    names = {key: name for name, key in attribute_map.items() if name in (*SIZES, *SMALL)}
    small = shrink_config_values({names.get(key, key): value for key, value in config.to_dict().items()})
    own = {name: key for key, name in names.items()}
    return type(config).from_dict({own.get(key, key): value for key, value in small.items()})


def shrink_config_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a smaller model's config; keys have the names of Llama's config."""
    small = {key: _shrink_value(key, value) for key, value in config.items()}
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and heads > 0:
        width = config.get("hidden_size", 0) // heads
        small["num_attention_heads"] = min(heads, 2 if width >= WIDE_HEAD else 4)
        if config.get("head_dim") in (None, width) and "qk_nope_head_dim" not in config:
            # The width of heads stays, because tables of rotary positions have its length.
            small["hidden_size"] = small["num_attention_heads"] * width
        if isinstance(kv_heads, int):
            small["num_key_value_heads"] = _shrink_kv_heads(heads, kv_heads, small["num_attention_heads"])
    if config.get("head_dim") and "qk_rope_head_dim" in small:
        small["head_dim"] = min(config["head_dim"], small["qk_rope_head_dim"])  # the width that is rotated
    if (head_dim := config.get("qk_head_dim")) is not None and "qk_nope_head_dim" in config:
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"] if head_dim else head_dim
    return small | _shrink_layer_keys(config)


def _shrink_value(key: str, value: Any) -> Any:
    """Return a small value for a size, and any other value unchanged."""
    if key.endswith("_token_id"):
        return 0 if key == "pad_token_id" and value else [1] if isinstance(value, list) else value and 1
    if isinstance(value, dict) and any(size in value for size in SIZES):
        return shrink_config_values(value)  # of a part of the model: `text_config`, `vision_config`
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if "intermediate_size" in key or key.endswith("ffn_dim"):
        return min(value, WIDTH)
    if key in EXPERT_COUNTS:
        return min(value, 4)
    return min(value, SMALL[key]) if key in SMALL else value


def _shrink_kv_heads(heads: int, kv_heads: int, small_heads: int) -> int:
    """
    Return the small model's key-value heads, with the same sharing: one for all queries, one per query head, or
    grouped.
    """
    if kv_heads in (1, heads):
        return 1 if kv_heads == 1 else small_heads
    return max(1, small_heads // 2)


def _shrink_layer_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small number of layers, and lists and tables by layer cut to it."""
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):
        return {}
    by_layer = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == layers}
    count = min(layers, MAX_LAYERS if by_layer else 4)
    small: dict[str, Any] = {key: value[:count] for key, value in by_layer.items()}
    for key, value in config.items():
        if isinstance(value, dict) and value and all(str(layer).isdigit() for layer in value):
            small[key] = {layer: value[layer] for layer in value if int(layer) < count}
    return {"num_hidden_layers": count} | small
