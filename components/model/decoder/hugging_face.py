"""Decoders in Hugging Face's form: reading and writing `config.json`."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import attrs

from drawloom import UserError
from drawloom.components.model.decoder.config import (
    COMMON_FIXED,
    TOKEN_IDS,
    DecoderConfig,
    Family,
    derive_head_sizes,
    find_size_faults,
)
from drawloom.components.model.decoder.layer_types import FULL, SLIDING, alternate_by_layer
from drawloom.components.model.decoder.rope import InvalidSetting, RopeScaling
from drawloom.components.model.decoder.rope_scaling import USED, find_rope_faults, longrope_attention_factor
from drawloom.components.storage.durable_files import open_untrusted_file
from drawloom.components.storage.strict_json import parse_strict_json
from drawloom.graph.types.structure import CONVERTER
from drawloom.ports import ConfigJson, Settings

HUGGING_FACE = [kind for kind in USED if kind != "ntk"]
"""The values of `rope_type` in a `config.json`; static NTK is written there as a larger `rope_theta`."""

READ_TYPES: dict[str, Any] = {
    "block_ff_dim": int,
    "block_multiple_of": int,
    "full_attention_interval": int,
    "index_skip_topk_offset": int,
    "index_topk_freq": int,
    "no_rope_layer_interval": int,
    "rotary_dim": int,
    "sliding_window_pattern": int,
    **dict.fromkeys(("layer_types", "hybrid_override_pattern", "index_topk_pattern"), list[str] | str),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "linear_attn_config"), dict[str, Any]),
    "block_ffn_dim_multiplier": float,
    "full_attn_idxs": list[int],
    "mlp_layer_types": list[str],
    "per_layer_config": dict[str, dict[str, Any]],
}
"""Types of the keys that `read_keys` converts, where they are not settings, or are settings of another type."""

HOISTED = ("rope_theta", "partial_rotary_factor")
"""Keys that transformers 5 writes in `rope_parameters`."""

BESIDES = (*HOISTED, "rope_type", "type")
"""Keys in `rope_parameters` beside the scaling's."""


def _parse_scaling(rope: Settings, config: Settings, ignored: Collection[str]) -> RopeScaling | None:
    """Return a config's rotary scaling, None without one. Raises ValueError if it can't be built."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    given = {key: value for key, value in rope.items() if key not in (*BESIDES, *ignored) and value is not None}
    if kind not in HUGGING_FACE:
        kinds = ", ".join(HUGGING_FACE)
        raise ValueError(f"scales rotary positions by rope_type = {kind!r}, where only {kinds} can be built")
    if kind == "longrope" and "factor" in given:  # only for the factor of attention
        factor, original = given.pop("factor"), given.get("original_max_position_embeddings")
        if type(factor) in (int, float) and type(original) is int:
            given.setdefault("attention_factor", longrope_attention_factor(factor, original))
    if (length := "original_max_position_embeddings") in USED[kind]:
        # What stands at the top of a config is used before what is within, as by transformers.
        given[length] = config.get(length) or given.get(length, config.get("max_position_embeddings"))
    scaling, problems = CONVERTER.structure({"rope_type": kind, **given}, RopeScaling)
    for problem in problems:
        raise ValueError(f"has an invalid {problem.path[0]} for rotary positions: {problem.text}")
    for fault in find_rope_faults(scaling, None):
        raise ValueError(f"can't be built: {fault.why}")
    return None if kind == "default" else scaling


MAX_CONFIG = 2**20
"""Maximum size of a config in bytes; real ones have a few thousand."""

OTHER_KEYS = {"num_local_experts": "num_experts"}
"""From a newer name in transformers to the name in published files."""


def read_config(family: type[Family], path: Path) -> DecoderConfig:
    """Read a `config.json`, or the one in a folder. Raises UserError if it is not a config of the family."""
    path = locate_config_json(path)
    return _build_architecture(family, read_config_json(path), path)


def _text_config(family: type[Family], config: Settings) -> Settings:
    """
    Return a multimodal model's text config, or any other config unchanged.

    A sequence classifier has no lm_head, so its language model uses the embedding.
    """
    if "ForSequenceClassification" in str(config.get("architectures")):
        return {**config, "tie_word_embeddings": True}
    if not _is_multimodal(family, config):
        return config
    tied = {key: config[key] for key in config.keys() & {"tie_word_embeddings"}}
    return {**config["text_config"], **tied}


def _is_multimodal(family: type[Family], config: Settings) -> bool:
    """Return whether a `config.json` has a config for the family as its text config."""
    return config.get("model_type") in family.nested_types and isinstance(config.get("text_config"), Mapping)


ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

OF_CLASSIFIERS = ("num_labels", "id2label", "label2id", "problem_type")
"""Keys for sequence classifiers, which a language model does not have."""


def build_updated_folder_config(
    family: type[Family], path: Path, architecture: DecoderConfig, text_only: bool
) -> ConfigJson:
    """
    Return the `config.json` at `path`, as a language model's config, with a model's values for changed keys.

    With `text_only` a multimodal model's text config is returned, and the family's main type and class are named.
    Raises UserError if the config can't be read.
    """
    original = read_config_json(path)
    before = family.build_config(_build_architecture(family, original, path))
    written = family.build_config(architecture)
    is_multimodal = _is_multimodal(family, original)
    text = _replace_changed_keys(family, original["text_config"] if is_multimodal else original, before, written)
    if text_only or not is_multimodal:
        text = {**{key: original[key] for key in TOKEN_IDS if key in original}, **text}
        if not text_only and "ForCausalLM" in str(text.get("architectures")):
            return text
        named = {key: written[key] for key in ("architectures", "model_type")}
        return {key: value for key, value in text.items() if key not in OF_CLASSIFIERS} | named
    both = ("tie_word_embeddings", "vocab_size")
    changed = {key: written[key] for key in both if key in original and written[key] != before[key]}
    return {**original, "text_config": text, **changed}


def _replace_changed_keys(family: type[Family], config: Settings, before: Settings, written: Settings) -> ConfigJson:
    """Return a config with the differences between two written ones, and without the changed keys' other names."""
    changed = {key: value for key, value in written.items() if key not in before or before[key] != value}
    if changed.keys() & set(ROPE_KEYS) or before.keys() - written.keys():
        rope = dict(written.get("rope_parameters") or {"rope_type": "default", "rope_theta": written["rope_theta"]})
        if isinstance(old_rope := config.get("rope_parameters"), Mapping):
            rope |= {key: old_rope[key] for key in family.config_type.image_keys if key in old_rope}
        changed |= {key: written[key] for key in ROPE_KEYS if key in written} | {"rope_parameters": rope}
        config = {key: value for key, value in config.items() if key not in ROPE_KEYS}
    names = _list_names_in_files(family)
    replaced = {names.get(key, key) for key in changed}
    return {key: value for key, value in config.items() if names.get(key, key) not in replaced} | changed


def _list_names_in_files(family: type[Family]) -> dict[str, str]:
    """Return our keys, by their names in files."""
    return OTHER_KEYS | {theirs: ours for ours, theirs in family.config_type.renamed.items()}


def locate_config_json(path: Path) -> Path:
    """Return the path to a folder's `config.json`, or the path itself if it is not a folder."""
    return path / "config.json" if path.is_dir() else path


def read_config_json(path: Path) -> ConfigJson:
    """Return the object in a `config.json`. Raises UserError if it can't be read."""
    try:
        with open_untrusted_file(path, "write the path of a config.json") as file:
            # The path may be any file, so at most MAX_CONFIG bytes are read.
            text = file.read(0, min(file.size, MAX_CONFIG))
    except UserError as error:
        raise UserError(f"config: {error}") from error
    try:
        config = parse_strict_json(text, max_values=MAX_CONFIG, infinities=True)  # as in Nemotron's time_step_limit
    except ValueError as error:
        raise UserError(f"config: {path} is not JSON ({error}); write the path of a config.json") from error
    if not isinstance(config, dict):
        raise UserError(f"config: {path} does not contain a JSON object; write the path of a config.json")
    if not isinstance(kind := config.get("model_type"), str | None):
        raise UserError(
            f"config: {path} says model_type = {json.dumps(kind)}, which is not a name; write the model's type"
        )
    return config


def _build_architecture(family: type[Family], config: Settings, path: Path) -> DecoderConfig:
    """Build a config object from a `config.json`; `path` is for messages. Raises UserError for an invalid one."""
    try:
        return _convert_to_architecture(family, _text_config(family, config))
    except ValueError as error:
        kinds = " or ".join((family.model_type, *family.other_types))
        instead = f"correct it, or use the config.json of a {kinds} model"
        raise UserError(f"config: {path} {error}; {instead}") from error


def _convert_to_architecture(family: type[Family], config: Settings) -> DecoderConfig:
    """Build a config object. Raises ValueError with a reason that follows the path."""
    # transformers 5 writes newer names, and folders of either age are read.
    names = _list_names_in_files(family)
    _check_types(family, config, names)
    config = {names.get(key, key): x for key, x in config.items() if x is not None or key not in READ_TYPES}
    config |= {key: 0 for key in family.config_type.zero_is_null if config.get(key, 0) is None}
    config = family.config_type.read_keys(config)
    for key, (period_key, other, last) in family.config_type.periods.items():
        layers, period = config.get("num_hidden_layers"), config.get(period_key, 0)
        if config.get(key) is None and layers and period > 0:
            config[key] = alternate_by_layer(layers, period, other, last)
    # transformers 4 writes rope_scaling, and null if there is none; transformers 5 writes rope_parameters.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    config |= {key: rope[key] for key in HOISTED if key in rope}
    scaling = _parse_scaling(rope, config, family.config_type.image_keys)
    if scaling and "rope_scaling" not in family.keys:
        raise ValueError(f"says rope_scaling = {json.dumps(rope)}, where only null can be built")
    if config.get("use_sliding_window") and config.get("sliding_window", 0) is None:
        config["use_sliding_window"] = False  # as to transformers; a missing window is the default
    nullable = {key for key, field in family.keys.items() if type(None) in get_args(field.type)}
    given = {key: value for key, value in config.items() if value is not None or key in nullable}
    config = {**family.hf_defaults, **given}
    values = {key: config[key] for key in family.keys if key in config and key != "rope_scaling"}
    _check_fixed_values(family, config)
    for key, value in values.items():
        field = family.keys[key]
        values[key], problems = CONVERTER.structure(value, field.type, field.metadata["check"])
        for problem in problems:
            raise ValueError(f"has an invalid {key}: {problem.text}")
    if family.derives_head_dim:
        values = derive_head_sizes(values) | values
    # A missing rope_theta is refused, too, because transformers' default is not Qwen3's.
    needed = [*family.required_keys, *(["rope_theta"] if "rope_theta" in family.keys else [])]
    if missing := [family.config_type.renamed.get(key, key) for key in needed if key not in values]:
        raise ValueError(f"lacks {', '.join(missing)}")
    architecture = family.config_type(**{**values, "rope_scaling": scaling})
    for fault in find_inconsistent_sizes(architecture):
        raise ValueError(f"is inconsistent: {fault.why}")
    layers = range(architecture.num_hidden_layers)
    kinds = [FULL if architecture.window_of(layer) is None else SLIDING for layer in layers]
    types = config.get("layer_types") or kinds
    # Other types, such as linear_attention, are keys of the family's own config.
    if any(kind != other and kind in (FULL, SLIDING) for kind, other in zip(types, kinds, strict=False)):
        raise ValueError(f"has layer_types that contradict its other keys, by which they are {json.dumps(kinds)}")
    return architecture


def _check_types(family: type[Family], config: Settings, names: Mapping[str, str]) -> None:
    """Raise ValueError for a value of another type than its key's, or outside its bounds; null is allowed."""
    checked = {key: (field.type, field.metadata["check"]) for key, field in family.keys.items()}
    checked |= {key: (kind, None) for key, kind in READ_TYPES.items()}
    for name, value in config.items():
        if value is not None and (key := names.get(name, name)) in checked:
            kind, check = checked[key]
            for problem in CONVERTER.structure(value, kind, check)[1]:
                raise ValueError(f"has an invalid {name}: {problem.text}")


def find_inconsistent_sizes(architecture: DecoderConfig) -> Iterator[InvalidSetting]:
    """Yield sizes that do not fit one another."""
    sizes = attrs.asdict(architecture, recurse=False)
    yield from find_size_faults(sizes)
    yield from architecture.find_faults(sizes)


def _check_fixed_values(family: type[Family], config: Settings) -> None:
    """Raise ValueError for a value other than the only one that can be built."""
    kinds = (family.model_type, *family.other_types)
    if (kind := config.get("model_type", family.model_type)) not in kinds:
        raise ValueError(f"says model_type = {json.dumps(kind)}, which {family.class_name} does not read")
    whole_heads = {} if "partial_rotary_factor" in family.keys else {"partial_rotary_factor": 1.0}
    # Configs of text embedders may have is_causal = false.
    for key, value in {"is_causal": True, **whole_heads, **COMMON_FIXED, **family.fixed}.items():
        if config.get(key, value) != value:
            raise ValueError(f"says {key} = {json.dumps(config[key])}, where only {json.dumps(value)} can be built")
