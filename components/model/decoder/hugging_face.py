"""Decoders in Hugging Face's form: names of parameters, and reading and writing of `config.json`."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.model.decoder.config import MAX_SIZES, DecoderConfig, head_faults
from drawloom.components.model.decoder.rope import InvalidSetting, read_rope, rope_faults, rope_parameters_of
from drawloom.components.ports.weights import Mapper
from drawloom.components.storage.regular_file import open_regular_file
from drawloom.components.storage.strict_json import parse
from drawloom.components.weights.mapper import parallel, sequential
from drawloom.components.weights.mapper_ops import chunk, identity, unstack
from drawloom.graph import UserError


def mapper_of(names: Iterable[str], num_experts: int) -> Mapper:
    """Maps parameters of these names to the tensors of files; `num_experts` is the number in a layer, or 0."""
    return parallel(*(_mapper_of(name, num_experts) for name in names))


def _mapper_of(name: str, num_experts: int) -> Mapper:
    layer, _, projection = name.rpartition(".")
    experts = [f"{layer}.{expert}" for expert in range(num_experts)]
    # Experts are stacked in one parameter here, and are separate tensors in published files.
    if name.endswith(".experts.gate_up_proj"):
        return sequential(unstack(name, experts), parallel(*_halves(experts)))
    if name.endswith(".experts.down_proj"):
        return unstack(name, [f"{expert}.{projection}.weight" for expert in experts])
    return identity(name)


def _halves(experts: Iterable[str]) -> Iterator[Mapper]:
    for expert in experts:
        yield chunk(expert, [f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight"])


@attrs.frozen
class Family:
    """
    A family of models: its component's name, its architecture, and its names in a `config.json`.

    `needed` are settings without a default; `hf_defaults` are transformers' defaults of a config's keys, where they
    differ from ours; `fixed` are values that a config must have for a model to be built, and gets when it is written.
    `nullable` are keys that may be null; `renamed` are keys that the family's files call otherwise. With
    `derives_head_dim` a config may leave out the sizes of heads.
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

    @property
    def keys(self) -> list[str]:
        """The keys of a `config.json` that have one form; those of rotary positions have two."""
        return [field.name for field in attrs.fields(self.architecture) if field.name != "rope_scaling"]

    @property
    def settings(self) -> list[str]:
        """The names of the settings that a config gives."""
        return [*self.keys, "rope_scaling", "rope_parameters"]


MAX_CONFIG = 2**20
"""Bytes of a config that are read at most; real ones have a few thousand."""

OTHER_KEYS = {"num_local_experts": "num_experts"}
"""From a newer name in transformers to the name in published files."""

FIXED = {"attention_dropout": 0.0, "hidden_act": "silu"}
"""The `fixed` values of all families."""


def config_of(family: Family, architecture: DecoderConfig, end: int | None) -> dict[str, Any]:
    """The `config.json` of a model; `end` is the id that ends a text, if there is a tokenizer."""
    numbers = {family.renamed.get(key, key): _plain(getattr(architecture, key)) for key in family.keys}
    known_end = {} if end is None else {"eos_token_id": end}
    named = {"architectures": [family.class_name], "model_type": family.model_type}
    rope = rope_parameters_of(architecture.rope_scaling, architecture.rope_theta, architecture.head_dim)
    return {**named, **FIXED, **family.fixed, **numbers, **rope, **known_end, "use_cache": True}


def read_config(family: Family, path: Path) -> DecoderConfig:
    """The architecture in a `config.json`, or in a folder with one; UserError if it is not of the family."""
    path = config_path(path)
    return _architecture(family, read_json(path), path)


def config_path(path: Path) -> Path:
    """The `config.json` of a folder, or the path itself."""
    return path / "config.json" if path.is_dir() else path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a `config.json`; UserError if it can't be read."""
    try:
        with open_regular_file(path, "write the path of a config.json") as file:
            # The path may be any file: one of gigabytes is not read whole to find that it is no config.
            text = file.read(0, min(file.size, MAX_CONFIG))
    except UserError as error:
        raise UserError(f"config: {error}") from error
    try:
        config = parse(text, most=MAX_CONFIG)
    except ValueError as error:
        raise UserError(f"config: {path} is not JSON ({error}); write the path of a config.json") from error
    if not isinstance(config, dict):
        raise UserError(f"config: {path} holds no JSON object; write the path of a config.json")
    return config


def _architecture(family: Family, config: Mapping[str, Any], path: Path) -> DecoderConfig:
    # transformers 5 writes newer names, and folders of either age are read.
    names = OTHER_KEYS | {theirs: ours for ours, theirs in family.renamed.items()}
    config = {names.get(key, key): value for key, value in config.items()}
    try:
        base, rope = read_rope(config)
    except ValueError as error:
        raise UserError(f"config: {path} {error}; take the config.json of {family.called}") from error
    config |= {"rope_theta": base}
    if config.get("use_sliding_window") and config.get("sliding_window", 0) is None:
        config["use_sliding_window"] = False  # as to transformers; a missing window is the default
    config = {**family.hf_defaults, **{key: value for key, value in config.items() if value is not None}} | {
        key: None for key in family.nullable if key in config and config[key] is None
    }
    found = {key: config[key] for key in family.keys if key in config}
    found = _with_head_sizes(family, found)
    for reason in (*_differences(family, config), *_gaps(family, found), *_wrong_types(family, found)):
        raise UserError(f"config: {path} {reason}; take the config.json of {family.called}")
    architecture = family.architecture(**{**found, "rope_scaling": rope})
    if reason := _other_windows(architecture, config):
        raise UserError(f"config: {path} {reason}; take the config.json of {family.called}")
    for fault in architecture_faults(architecture):
        raise UserError(f"config: in {path}, {fault.why}; take the config.json of {family.called}")
    return architecture


def architecture_faults(architecture: DecoderConfig) -> Iterator[InvalidSetting]:
    """Sizes that do not fit one another."""
    yield from head_faults(architecture.num_attention_heads, architecture.num_key_value_heads, architecture.head_dim)
    if architecture.rope_scaling is not None:
        yield from rope_faults(architecture.rope_scaling, architecture.head_dim)
    yield from architecture.faults(attrs.asdict(architecture, recurse=False))


def _differences(family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    """Values of a config that the model does not implement."""
    # Any config may have is_causal, which only those of embedders do; none that is written needs it.
    for key, value in {"model_type": family.model_type, "is_causal": True, **FIXED, **family.fixed}.items():
        if config.get(key, value) != value:
            yield f"says {key} = {json.dumps(config[key])}, where only {json.dumps(value)} can be built"


def _other_windows(architecture: DecoderConfig, config: Mapping[str, Any]) -> str:
    """Why `layer_types` are not those that other keys say; empty if they are, or if it is missing."""
    layers = range(architecture.num_hidden_layers)
    kinds = ["full_attention" if architecture.window_of(n) is None else "sliding_attention" for n in layers]
    if (config.get("layer_types") or kinds) == kinds:
        return ""
    return f"says layer_types other than {json.dumps(kinds)}, which its other keys say, and only these can be built"


def _with_head_sizes(family: Family, found: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the sizes of heads that transformers derives where they are missing, unless a family has others."""
    found = dict(found)
    heads, width = found.get("num_attention_heads"), found.get("hidden_size")
    if family.derives_head_dim and type(heads) is int and type(width) is int and heads > 0:
        found.setdefault("head_dim", width // heads)
        found.setdefault("num_key_value_heads", heads)
    return found


def _gaps(family: Family, found: Mapping[str, Any]) -> Iterator[str]:
    """Missing keys; rope_theta is one, because transformers' default of it is not Qwen3's."""
    needed = [field.name for field in attrs.fields(family.architecture) if field.default is attrs.NOTHING]
    if missing := [family.renamed.get(key, key) for key in (*needed, "rope_theta") if key not in found]:
        yield f"lacks {', '.join(missing)}"


def _wrong_types(family: Family, found: Mapping[str, Any]) -> Iterator[str]:
    types = {field.name: field.type for field in attrs.fields(family.architecture)}
    for name, value in found.items():
        if value is None and name in family.nullable:
            continue
        wanted, fits = KINDS.get(name) or KINDS[types[name]]
        if fits(value) and name in MAX_SIZES and value > MAX_SIZES[name]:
            yield f"says {name} = {value}, which is more than {MAX_SIZES[name]}"
        elif not fits(value):
            yield f"says {name} = {json.dumps(value)}, which is not {wanted}"


def _is_number(value: Any) -> bool:
    # isinstance would take a bool for an int.
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: type(value) is bool),
    int: ("int above 0", lambda value: type(value) is int and value > 0),
    float: ("float above 0", lambda value: _is_number(value) and value > 0),
    "sliding_window": ("int above 0", lambda value: type(value) is int and value > 0),
    "max_window_layers": ("int of 0 or more", lambda value: type(value) is int and value >= 0),
    "router_aux_loss_coef": ("float of 0 or more", lambda value: _is_number(value) and value >= 0),
    "router_z_loss_coef": ("float of 0 or more", lambda value: _is_number(value) and value >= 0),
    "first_k_dense_replace": ("int of 0 or more", lambda value: type(value) is int and value >= 0),
    "mlp_only_layers": (
        "a list of layers' numbers",
        lambda value: type(value) is list and all(type(number) is int and number >= 0 for number in value),
    ),
}
"""By type or name of a field: a description of its values, and a check."""
