"""Qwen3 as Hugging Face describes it: `config.json` and parameters, in both directions."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.model.qwen3.architecture import Architecture, head_faults
from drawloom.components.model_state.composing import parallel, prefixed
from drawloom.components.model_state.leaves import rename
from drawloom.components.model_state.regular_file import open_regular_file
from drawloom.components.model_state.strict_json import parse
from drawloom.components.ports.model_state import Mapper
from drawloom.graph import UserError

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
"""Our names to the config's."""

MAX_CONFIG = 2**20
"""Bytes that are read of a config; real ones have a few thousand."""

FIXED = {
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_sliding_window": False,
}
"""What a config says of every model that we can build."""

LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def config_of(architecture: Architecture, end: int | None) -> dict[str, Any]:
    """The `config.json` of a model, with the id that ends a text if it is known."""
    numbers = {theirs: getattr(architecture, ours) for ours, theirs in KEYS.items()}
    known_end = {} if end is None else {"eos_token_id": end}
    return {"architectures": ["Qwen3ForCausalLM"], **FIXED, **numbers, **known_end, "use_cache": True}


def mapper_of(architecture: Architecture) -> Mapper:
    """Our parameters to Hugging Face's."""
    layer = rename({f"{ours}.weight": f"{theirs}.weight" for ours, theirs in LAYER_NAMES.items()})
    numbers = range(architecture.layers)
    head = {} if architecture.tied else {"head.weight": "lm_head.weight"}
    return parallel(
        rename({"embedding.weight": "model.embed_tokens.weight"}),
        *(prefixed(layer, source=f"layers.{n}.", target=f"model.layers.{n}.") for n in numbers),
        rename({"norm.weight": "model.norm.weight"} | head),
    )


def read_config(path: Path) -> Architecture:
    """The model that a `config.json`, or the folder that holds it, describes; UserError if we can't build it."""
    path = path / "config.json" if path.is_dir() else path
    try:
        with open_regular_file(path, "write the path of a config.json") as file:
            text = file.read(0, min(file.size, MAX_CONFIG))
    except UserError as error:
        raise UserError(f"config: {error}") from error
    try:
        config = parse(text, most=MAX_CONFIG)
    except ValueError as error:
        raise UserError(f"config: {path} is not JSON ({error}); write the path of a config.json") from error
    if not isinstance(config, dict):
        raise UserError(f"config: {path} holds no JSON object; write the path of a config.json")
    return _architecture(_with_rope_base(config, path), path)


def _architecture(config: Mapping[str, Any], path: Path) -> Architecture:
    found = {ours: config[theirs] for ours, theirs in KEYS.items() if config.get(theirs) is not None}
    for reason in (*_differences(config), *_gaps(found), *_wrong_types(found)):
        raise UserError(f"config: {path} {reason}; take the config.json of a Qwen3 dense model")
    architecture = Architecture(**found)
    for fault in head_faults(architecture.heads, architecture.kv_heads, architecture.head_dim):
        raise UserError(f"config: in {path}, {fault.why}; take the config.json of a Qwen3 dense model")
    return architecture


def _differences(config: Mapping[str, Any]) -> Iterator[str]:
    """What a config says that the model can't do."""
    for key, value in FIXED.items():
        if config.get(key, value) != value:
            yield f"says {key} = {json.dumps(config[key])}, where only {json.dumps(value)} can be built"
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        yield "says layer_types of more than one kind, where only full_attention can be built"


def _gaps(found: Mapping[str, Any]) -> Iterator[str]:
    """Hugging Face's default for the base is not that of Qwen3, so it must be there."""
    needed = [field.name for field in attrs.fields(Architecture) if field.default is attrs.NOTHING]
    if missing := [KEYS[key] for key in (*needed, "rope_base") if key not in found]:
        yield f"lacks {', '.join(missing)}"


def _wrong_types(found: Mapping[str, Any]) -> Iterator[str]:
    for field in attrs.fields(Architecture):
        value, kind = found.get(field.name), field.type or int
        fits = type(value) is kind or (kind is float and type(value) is int)
        if value is not None and not (fits and (kind is bool or value > 0)):
            wanted = "true or false" if kind is bool else f"{kind.__name__} above 0"
            yield f"says {KEYS[field.name]} = {json.dumps(value)}, which is not {wanted}"


def _with_rope_base(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The base of rotary positions stands at the top in older configs and in `rope_parameters` in newer ones."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"config: {path} stretches rotary positions ({kind}), which can't be built; choose another")
    return {**config, "rope_theta": rope.get("rope_theta", config.get("rope_theta"))}
