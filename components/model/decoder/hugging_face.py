"""Decoders in Hugging Face's form: parameter names, and reading and writing `config.json`."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.model.decoder.config import (
    MAX_SIZES,
    SLIDING,
    DecoderConfig,
    find_head_count_faults,
    num_experts,
)
from drawloom.components.model.decoder.rope import (
    InvalidSetting,
    build_rope_parameters,
    find_rope_faults,
    parse_rope_theta_and_scaling,
)
from drawloom.components.model.decoder.values import find_key_check
from drawloom.components.ports.weights import Mapper
from drawloom.components.storage.regular_file import open_untrusted_file
from drawloom.components.storage.strict_json import parse_strict_json
from drawloom.components.weights.mapper import parallel, sequential
from drawloom.components.weights.mapper_ops import chunk, identity, unstack
from drawloom.graph import UserError


def create_decoder_mapper(names: Iterable[str], architecture: DecoderConfig) -> Mapper:
    """Return the mapper from parameters with these names to tensors in files."""
    count = num_experts(architecture)
    return parallel(*(_create_parameter_to_files_mapper(name, count) for name in names))


def _create_parameter_to_files_mapper(name: str, num_experts: int) -> Mapper:
    """Return the mapper from one parameter to its tensors in files, where experts are separate."""
    layer, _, projection = name.rpartition(".")
    experts = [f"{layer}.{expert}" for expert in range(num_experts)]
    # Experts are stacked in one parameter here, and are separate tensors in published files.
    if name.endswith(".experts.gate_up_proj"):
        return sequential(unstack(name, experts), parallel(*_create_gate_up_split_mappers(experts)))
    if name.endswith(".experts.down_proj"):
        return unstack(name, [f"{expert}.{projection}.weight" for expert in experts])
    return identity(name)


def _create_gate_up_split_mappers(experts: Iterable[str]) -> Iterator[Mapper]:
    """Yield mappers that split every expert's joined matrix into its gate and up projections."""
    for expert in experts:
        yield chunk(expert, [f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight"])


def _return_unchanged(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config: the default conversion for families without keys that need one."""
    return config


@attrs.frozen
class Family:
    """
    Family of models: its component's name, its config class, and its keys in a `config.json`.

    `needed` are settings without a default; `hf_defaults` are transformers' defaults for a config's keys, where they
    differ from ours; `fixed` are values that a config must have for a model to be built, and gets when it is written.
    `nullable` keys may be null; `renamed` maps our keys to the names in files. With `derives_head_dim` a config may
    leave out head sizes. Files may have `model_type` or one of `other_types`; multimodal models with `nested_types`
    have such a config as `text_config`, and map to the decoder's prefix in the model that transformers builds for
    causal language modeling. `read` converts a `config.json` to the config class's keys, before defaults are filled in,
    and raises ValueError, with a reason that follows the path, for a config that can't be built; `write` is its
    inverse, for a complete `config.json`. `mapper` maps parameters to tensors in files; `ignored` are patterns
    (fnmatch) for tensors that are not loaded, in which {layers} is the number of layers.
    """

    component: str
    called: str
    architecture: type[DecoderConfig]
    model_type: str
    class_name: str
    needed: tuple[str, ...] = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    hf_defaults: Mapping[str, Any] = attrs.field(factory=dict)
    fixed: Mapping[str, Any] = attrs.field(factory=dict)
    nullable: tuple[str, ...] = ()
    renamed: Mapping[str, str] = attrs.field(factory=dict)
    derives_head_dim: bool = True
    other_types: tuple[str, ...] = ()
    nested_types: Mapping[str, str] = attrs.field(factory=dict)
    ignored: tuple[str, ...] = ()
    read: Callable[[dict[str, Any]], dict[str, Any]] = _return_unchanged
    write: Callable[[dict[str, Any]], dict[str, Any]] = _return_unchanged
    mapper: Callable[[Iterable[str], DecoderConfig], Mapper] = create_decoder_mapper

    @property
    def config_keys(self) -> list[str]:
        """The keys in a `config.json` except rotary scaling, which has two forms."""
        return [field.name for field in attrs.fields(self.architecture) if field.name != "rope_scaling"]

    @property
    def settings_from_config_json(self) -> list[str]:
        """The names of recipe settings that a `config.json` can set."""
        return [*self.config_keys, "rope_scaling", "rope_parameters"]


MAX_CONFIG = 2**20
"""Maximum size of a config in bytes; real ones have a few thousand."""

OTHER_KEYS = {"num_local_experts": "num_experts"}
"""From a newer name in transformers to the name in published files."""

FIXED = {"attention_dropout": 0.0, "hidden_act": "silu"}
"""The `fixed` values of all families."""


def build_hugging_face_config(family: Family, architecture: DecoderConfig, eos_id: int | None) -> dict[str, Any]:
    """Return the `config.json` for a model; `eos_id` is the id that ends a text, if there is a tokenizer."""
    numbers = {
        family.renamed.get(key, key): _convert_tuple_to_list(getattr(architecture, key)) for key in family.config_keys
    }
    # transformers' defaults of a family may lie outside of a smaller vocabulary.
    known_end = {"pad_token_id": None} | ({} if eos_id is None else {"eos_token_id": eos_id})
    named = {"architectures": [family.class_name], "model_type": family.model_type}
    rope = build_rope_parameters(architecture.rope_scaling, architecture.rope_theta, architecture.rotary_dim)
    return family.write({**named, **FIXED, **family.fixed, **numbers, **rope, **known_end, "use_cache": True})


def read_config(family: Family, path: Path) -> DecoderConfig:
    """Read a `config.json`, or the one in a folder. Raises UserError if it is not a config of the family."""
    path = locate_config_json(path)
    return _build_architecture(family, text_config(family, read_config_json(path)), path)


def text_config(family: Family, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """
    Return a multimodal model's text config, or any other config unchanged.

    A sequence classifier has no lm_head, so its language model uses the embedding.
    """
    if any("ForSequenceClassification" in str(name) for name in config.get("architectures") or ()):
        return {**config, "tie_word_embeddings": True}
    text = config.get("text_config")
    if config.get("model_type") not in family.nested_types or not isinstance(text, Mapping):
        return config
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**text, **tied}


OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys in `rope_parameters` for positions in images, which do not matter to text."""


def build_updated_folder_config(
    family: Family, path: Path, architecture: DecoderConfig, written: Mapping[str, Any]
) -> dict[str, Any]:
    """
    Replace a folder's text config by a model's `written` config; return it unchanged if it describes the same model.

    Raises UserError if the config at `path` can't be read.
    """
    original = read_config_json(path)
    old = text_config(family, original)
    if _build_architecture(family, old, path) == architecture:
        return dict(original)
    rope = dict(written.get("rope_parameters") or {"rope_type": "default", "rope_theta": written["rope_theta"]})
    if isinstance(old_rope := old.get("rope_parameters"), Mapping):
        rope |= {key: old_rope[key] for key in OF_IMAGES if key in old_rope}
    kept = {key: value for key, value in old.items() if key != "rope_scaling"}
    if old is original:
        return {**kept, **written, "rope_parameters": rope}
    text = {key: value for key, value in written.items() if key != "architectures"}
    tied = {key: written[key] for key in ("tie_word_embeddings",) if key in original}
    return {**original, "text_config": {**kept, **text, "rope_parameters": rope}, **tied}


def locate_config_json(path: Path) -> Path:
    """Return the path to a folder's `config.json`, or the path itself if it is not a folder."""
    return path / "config.json" if path.is_dir() else path


def read_config_json(path: Path) -> dict[str, Any]:
    """Return the object in a `config.json`. Raises UserError if it can't be read."""
    try:
        with open_untrusted_file(path, "write the path of a config.json") as file:
            # The path may be any file, so at most MAX_CONFIG bytes are read.
            text = file.read(0, min(file.size, MAX_CONFIG))
    except UserError as error:
        raise UserError(f"config: {error}") from error
    try:
        config = parse_strict_json(text, max_values=MAX_CONFIG)
    except ValueError as error:
        raise UserError(f"config: {path} is not JSON ({error}); write the path of a config.json") from error
    if not isinstance(config, dict):
        raise UserError(f"config: {path} does not contain a JSON object; write the path of a config.json")
    return config


def _build_architecture(family: Family, config: Mapping[str, Any], path: Path) -> DecoderConfig:
    """Build a config object from a `config.json`; `path` is for messages. Raises UserError for an invalid one."""
    # transformers 5 writes newer names, and folders of either age are read.
    names = OTHER_KEYS | {theirs: ours for ours, theirs in family.renamed.items()}
    config = {names.get(key, key): value for key, value in config.items()}
    try:
        config = family.read(_hoist_partial_rotary_factor(config, family.config_keys))
        base, rope = parse_rope_theta_and_scaling(config, "partial_rotary_factor" in family.config_keys)
    except ValueError as error:
        raise UserError(f"config: {path} {error}; use the config.json of {family.called} instead") from error
    config |= {"rope_theta": base}
    if config.get("use_sliding_window") and config.get("sliding_window", 0) is None:
        config["use_sliding_window"] = False  # as to transformers; a missing window is the default
    config = {**family.hf_defaults, **{key: value for key, value in config.items() if value is not None}} | {
        key: None for key in family.nullable if key in config and config[key] is None
    }
    values = {key: config[key] for key in family.config_keys if key in config}
    values = _derive_missing_head_sizes(family, values)
    for reason in (
        *_find_unsupported_values(family, config),
        *_describe_missing_keys(family, values),
        *_find_invalid_values(family, values),
    ):
        raise UserError(f"config: {path} {reason}; use the config.json of {family.called} instead")
    architecture = family.architecture(**{**values, "rope_scaling": rope})
    for fault in find_inconsistent_sizes(architecture):
        raise UserError(f"config: in {path}, {fault.why}; use the config.json of {family.called} instead")
    if reason := _find_layer_types_contradiction(architecture, config):
        raise UserError(f"config: {path} {reason}; use the config.json of {family.called} instead")
    return architecture


def _hoist_partial_rotary_factor(config: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Copy partial_rotary_factor from rope_parameters, where transformers 5 writes it, to the top of a config."""
    rope, key = config.get("rope_parameters") or config.get("rope_scaling"), "partial_rotary_factor"
    return config | {key: rope[key]} if key in keys and isinstance(rope, Mapping) and key in rope else config


def find_inconsistent_sizes(architecture: DecoderConfig) -> Iterator[InvalidSetting]:
    """Yield sizes that do not fit one another."""
    yield from find_head_count_faults(
        architecture.num_attention_heads, architecture.num_key_value_heads, architecture.head_dim
    )
    if architecture.rope_scaling is not None:
        yield from find_rope_faults(architecture.rope_scaling, architecture.rotary_dim)
    yield from architecture.find_faults(attrs.asdict(architecture, recurse=False))


def _find_unsupported_values(family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for every config value other than the only one that can be built."""
    # Configs of text embedders may have is_causal = false.
    kinds = (family.model_type, *family.other_types)
    kind = config.get("model_type", family.model_type)
    fixed = {"model_type": kind if kind in kinds else family.model_type, "is_causal": True}
    for key, value in {**fixed, **FIXED, **family.fixed}.items():
        if config.get(key, value) != value:
            yield f"says {key} = {json.dumps(config[key])}, where only {json.dumps(value)} can be built"


def _find_layer_types_contradiction(architecture: DecoderConfig, config: Mapping[str, Any]) -> str:
    """Return why `layer_types` contradicts other keys, or an empty string if it does not."""
    layers = range(architecture.num_hidden_layers)
    kinds = ["full_attention" if architecture.window_of(n) is None else "sliding_attention" for n in layers]
    types = config.get("layer_types") or kinds
    # Other types, such as linear_attention, are keys of the family's own config.
    if all(kind == other or kind not in ("full_attention", SLIDING) for kind, other in zip(types, kinds, strict=False)):
        return ""
    return f"has layer_types that contradict its other keys, by which they are {json.dumps(kinds)}"


def _derive_missing_head_sizes(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Add missing head_dim and num_key_value_heads as transformers derives them, if the family allows it."""
    values = dict(values)
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    if family.derives_head_dim and type(heads) is int and type(width) is int and heads > 0:
        values.setdefault("head_dim", width // heads)
        values.setdefault("num_key_value_heads", heads)
    return values


def _describe_missing_keys(family: Family, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message with all missing keys; rope_theta is needed, because transformers' default is not Qwen3's."""
    needed = [field.name for field in attrs.fields(family.architecture) if field.default is attrs.NOTHING]
    if missing := [family.renamed.get(key, key) for key in (*needed, "rope_theta") if key not in values]:
        yield f"lacks {', '.join(missing)}"


def _find_invalid_values(family: Family, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield values with a wrong type, or outside their bounds."""
    fields = {field.name: field for field in attrs.fields(family.architecture)}
    for name, value in values.items():
        if value is None and name in family.nullable:
            continue
        valid = find_key_check(fields[name])
        if valid.is_valid(value) and name in MAX_SIZES and value > MAX_SIZES[name]:
            yield f"says {name} = {value}, which is more than {MAX_SIZES[name]}"
        elif not valid.is_valid(value):
            yield f"says {name} = {json.dumps(value)}, which is not {valid.description}"


def _convert_tuple_to_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
