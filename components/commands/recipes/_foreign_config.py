"""Configuration files of other frameworks as a recipe: axolotl and TRL in YAML or arguments, torchtitan in TOML."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import tomli

from drawloom import UserError
from drawloom.graph.foreign_names import find_own_component, read_foreign_names
from drawloom.graph.toml.emit import dump_key, dump_toml
from drawloom.ports import ConfigJson, Settings

PARTS: Mapping[str, Mapping[str, Any]] = {
    "stages.recompute": {"selective": "selective", "full": "blocks", "true": "blocks", "none": "none", "false": "none"},
    "packing.use": {"true": "data.packing.best_fit", "false": "data.packing.padded"},
    "evaluate.every": {"epoch": "epoch", "no": "never"},
    "checkpoint.every": {"epoch": "epoch", "no": "never", "best": "epoch"},
    "adapters.lora.targets": {"all-linear": ["*_proj"]},
}
"""Values of settings by their names elsewhere, in lower case."""

FLAVORS = {
    "llama3/8b": "llama3_8b",
    "qwen3/0.6b": "qwen3_0_6b",
    "qwen3/8b": "qwen3_8b",
    "qwen3/30b-a3b": "qwen3_30b_a3b",
}
"""Shipped recipes by torchtitan's model and flavor."""

DATA_FILES = (".jsonl", ".json", ".parquet", ".arrow")


@attrs.define
class Imported:
    """A recipe in the making: values by key, their comments, bases to extend, and keys without a counterpart."""

    framework: str
    extends: list[str]
    values: ConfigJson = attrs.field(factory=dict)
    comments: dict[str, str] = attrs.field(factory=dict)
    notes: list[str] = attrs.field(factory=list)
    unmapped: list[str] = attrs.field(factory=list)

    def set_value(self, key: str, value: Any, comment: str) -> None:
        """Set a value of the recipe; the keys it comes from are its comment."""
        self.values[key] = value
        self.comments[key] = ", ".join(filter(None, (self.comments.get(key), comment)))

    def format_recipe(self, source: str, name: str) -> str:
        """Return the recipe as TOML with comments, for a run of this name unless the configuration has one."""
        self.comments.setdefault("run.name", source)
        values = {"run.name": name, **self.values}
        lines = [f"# From {source} ({self.framework}). Read the comments, then: drawloom check FILE"]
        lines += [f"# no counterpart: {line}" for line in self.unmapped]
        lines += [f"# not needed: {line}" for line in self.notes]
        bases = list(dict.fromkeys(self.extends))
        lines.append(f"extends = {dump_toml(bases[0] if len(bases) == 1 else bases)}")
        for key, value in sorted(values.items(), key=lambda item: _sort_key(item[0])):
            written = ".".join(map(dump_key, key.split(".")))
            comment = self.comments[key]
            lines.append(f"{written} = {dump_toml(value)}" + (f"  # {comment}" if comment else ""))
        return "\n".join(lines)


def _sort_key(key: str) -> tuple[bool, bool, str]:
    """Return a key's place: the run and the variables first, and the settings of a node together."""
    node = key.partition(".")[0]
    return node != "run", node != "vars", node


def read_config(path: Path) -> ConfigJson:
    """
    Return a file's values by key, where tables of TOML are joined by dots. Raises UserError.

    Files other than .toml, .yaml, .yml and .json are command lines with arguments such as `--learning_rate 2e-4`.
    """
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".toml":
            return dict(_flatten(tomli.loads(text)))
        if path.suffix in (".yaml", ".yml", ".json"):
            return _read_yaml(text, path)
        return dict(_read_arguments(shlex.split(text.replace("\\\n", " "), comments=True)))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}; give a YAML or TOML file, or one with a command's arguments", 2) from error


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_yaml(text: str, path: Path) -> ConfigJson:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise UserError("YAML needs the package pyyaml: pip install 'drawloom[yaml]'", 2) from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: {error}", 2) from error
    if not isinstance(values, dict):
        raise UserError(f"{path} has no keys; give a configuration file", 2)
    return {str(key): _read_number(value) for key, value in values.items()}


def _read_arguments(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of `--key value`, `--key=value` and `--flag`."""
    keys = [index for index, word in enumerate(words) if word.startswith("--")]
    for index, end in zip(keys, [*keys[1:], len(words)], strict=True):
        key, equals, value = words[index].removeprefix("--").partition("=")
        values = [value] if equals else words[index + 1 : end]
        plain = [_read_number(word) for word in values]
        yield key.replace("-", "_"), True if not plain else plain[0] if len(plain) == 1 else plain


def _read_number(value: Any) -> Any:
    """Return a text with a number or boolean as such: YAML 1.1 reads 2e-4 as text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    return value


def detect_framework(config: Settings) -> str:
    """Return the framework with most of these keys. Raises UserError if no key is known."""
    tables = read_foreign_names()
    counts = {name: len(config.keys() & tables[name].keys()) for name in tables["defaults"]}
    best = max(counts, key=counts.__getitem__)
    if not counts[best]:
        raise UserError(f"no key is known from {', '.join(counts)}: {', '.join(list(config)[:5])}", 2)
    return best


def import_config(config: Settings, framework: str, base: str | None, ranks: int) -> Imported:
    """Return the recipe for a framework's configuration, on this many data-parallel ranks."""
    tables = read_foreign_names()
    names, defaults = tables[framework], tables["defaults"][framework]
    imported = Imported(framework, [base or _choose_base(config, framework)])
    has_length = any(
        names.get(key, "").startswith("trainer.") and value not in (None, -1) for key, value in config.items()
    )
    for key, value in {**defaults, **config}.items():
        is_default = key not in config
        target = names.get(key)
        if value is None or (is_default and has_length and str(target).startswith("trainer.")):
            continue
        if target is None and not (key in ("model.name", "model.flavor") and imported.extends[0] in FLAVORS.values()):
            imported.unmapped.append(f"{key} = {value!r}")
        elif target is None:
            imported.notes.append(f"{key}: the recipe {imported.extends[0]} is {value}")
        elif target.startswith("- "):
            imported.notes.append(f"{key}: {target[2:]}")
        elif target.startswith("extends "):
            imported.extends += [target.removeprefix("extends ")] if value else []
        elif not target.startswith("batch."):
            try:
                converted = _convert_value(target, key, value, imported.values)
            except (TypeError, ValueError, ArithmeticError):
                converted = None  # a value of another kind than the key's
            if converted is not None:
                imported.set_value(target.partition(" ")[0], converted, f"default of {key}" if is_default else key)
            elif value not in WITHOUT_EFFECT:
                imported.unmapped.append(f"{key} = {value!r}")
    if {"trainer.steps", "trainer.epochs"} <= imported.values.keys():
        del imported.values["trainer.epochs"]  # of both, Trainer and axolotl take the steps
    _set_batch_sizes(imported, {**defaults, **config}, names, ranks)
    if "trackers.wandb.project" in imported.values:
        imported.set_value("trackers.wandb.use", "trackers.wandb", "")
    if imported.values.get("packing.use") == "data.packing.padded":
        imported.set_value("packing.length", "$vars.length", "")
    if imported.extends[0] not in ("chat", "pretrain_tokenized"):
        imported.values.pop("packing.use", None)  # pairs and prompts have a packing of their own
        imported.values.pop("packing.length", None)
    if config.get("checkpoint.enable") is False:
        imported.set_value("checkpoint.every", "never", "checkpoint.enable")
    if framework == "torchtitan":
        use = "learning_rate.wsd" if "lr.decay_percent" in imported.values else "learning_rate.linear"
        imported.set_value("lr.use", use, "lr_scheduler")
    else:
        _choose_overlays(imported, config)
    return imported


WITHOUT_EFFECT = (-1, "steps", "lora", "qlora", True, False)
"""Values that need no line in a recipe if their setting has none: a choice of the base, or the default."""


def _choose_base(config: Settings, framework: str) -> str:
    """Return the shipped recipe nearest to a configuration."""
    if framework == "torchtitan":
        flavor = f"{config.get('model.name')}/{config.get('model.flavor')}".lower()
        return FLAVORS.get(flavor, "pretrain_tokenized")
    if "num_generations" in config:
        return "grpo"
    kind = str(config.get("rl") or ("dpo" if "beta" in config else "chat"))
    return kind if kind in ("dpo", "kto", "grpo") else "dpo" if kind in ("ipo", "orpo", "simpo") else "chat"


def _choose_overlays(imported: Imported, config: Settings) -> None:
    """Extend the overlay for all weights, or for QLoRA, as the configuration has an adapter or none."""
    adapter = config.get("adapter") or config.get("use_peft")
    if adapter == "qlora":
        imported.extends.append("with_nf4")
    if not adapter and imported.extends[0] in ("chat", "dpo", "kto"):
        needs_reference = imported.extends[0] != "chat" and imported.values.get("loss.use") not in REFERENCE_FREE
        imported.extends.append("with_all_weights_and_reference" if needs_reference else "with_all_weights")


REFERENCE_FREE = ("loss.orpo", "loss.simpo", "loss.cpo")


def _convert_value(target: str, key: str, value: Any, values: Mapping[str, Any]) -> Any:
    """Return the value of drawloom's setting, or None if there is none to write."""
    own, _, factor = target.partition(" * ")
    if factor:
        return value * float(factor)
    if own == "optimizer.betas":
        first, second = values.get(own, [0.9, 0.999])
        return [first, value] if key.endswith("2") else [value, second]
    if own == "tokens.paths":
        paths = [entry.get("path") if isinstance(entry, dict) else entry for entry in value]
        return paths if all(str(path).endswith(DATA_FILES) for path in paths) else None
    if key.endswith("_per_epoch"):
        return {"epochs": 1 / value} if value else "never"
    if (part := PARTS.get(own, {}).get(str(value).lower())) is not None:
        return part
    if own == "loss.use":
        return f"loss.{value}"
    if own.endswith(".use"):
        return find_own_component(str(value))
    if own.startswith("mesh."):
        return ("auto" if own == "mesh.data_shard" else None) if value == -1 else None if value == 1 else value
    if own == "adapters.lora" or value == -1 or (own.endswith(".every") and not isinstance(value, int)):
        return None
    if own == "adapters.lora.targets":
        return [value] if isinstance(value, str) else value
    return str(value) if own in ("run.name", "vars.base") else value


def _set_batch_sizes(imported: Imported, config: Settings, names: Mapping[str, str], ranks: int) -> None:
    """Set the rows of a microbatch and of a step: in other frameworks a product."""
    sizes = {key: config[key] for key in config if names.get(key, "").startswith("batch.")}
    if odd := [key for key in sizes if not isinstance(sizes[key], int)]:
        raise UserError(f"{odd[0]} is {sizes[odd[0]]!r}; write a number of rows or steps", 2)
    micro = next((sizes[key] for key in sizes if names[key] == "batch.micro_size"), 1)
    steps = sizes.get("gradient_accumulation_steps", 1)
    total = sizes.get("training.global_batch_size", -1)
    text = f"{micro} x {steps} x {ranks} ranks (--ranks)"
    imported.set_value("batch.micro_size", micro, ", ".join(key for key in sizes if "global" not in key))
    imported.set_value("batch.global_size", total if total > 0 else micro * steps * ranks, text)
