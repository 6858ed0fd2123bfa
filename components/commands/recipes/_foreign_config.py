"""Configuration files of other frameworks as a recipe: axolotl and TRL in YAML or arguments, torchtitan in TOML."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
import tomli

from drawloom import UserError
from drawloom.graph.foreign_names import find_own_component, read_foreign_names
from drawloom.graph.toml.emit import dump_key, dump_toml
from drawloom.ports import ConfigJson, Settings, flatten_properties


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
        order = {"run": 0, "vars": 1}  # the run and the variables first, and the settings of a node together
        nodes = {key: key.partition(".")[0] for key in values}
        for key in sorted(values, key=lambda key: (order.get(nodes[key], 2), nodes[key])):
            written = ".".join(map(dump_key, key.split(".")))
            comment = self.comments[key]
            lines.append(f"{written} = {dump_toml(values[key])}" + (f"  # {comment}" if comment else ""))
        return "\n".join(lines)


def read_config(path: Path) -> ConfigJson:
    """
    Return a file's values by key, where tables of TOML are joined by dots. Raises UserError.

    Files other than .toml, .yaml, .yml and .json are command lines with arguments such as `--learning_rate 2e-4`.
    """
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".toml":
            return flatten_properties(tomli.loads(text))
        if path.suffix == ".json":
            return _convert_numbers(json.loads(text), path)
        if path.suffix in (".yaml", ".yml"):
            return _convert_numbers(_read_yaml(text, path), path)
        return dict(_read_arguments(shlex.split(text.replace("\\\n", " "), comments=True)))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}; give a YAML or TOML file, or one with a command's arguments", 2) from error


def _read_yaml(text: str, path: Path) -> Any:
    """Return a YAML text's value. Raises UserError if it is invalid, or without the package for YAML."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise UserError("YAML needs the package pyyaml: pip install 'drawloom[yaml]'", 2) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: {error}", 2) from error


def _convert_numbers(values: Any, path: Path) -> ConfigJson:
    """Return a file's keys and values, with numbers in place of texts with numbers. Raises UserError without keys."""
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
    is_policy = imported.extends[0] == "grpo"
    if is_policy and framework == "axolotl":  # its table has TRL's keys
        names, config = {**tables["trl"], **names}, {**config, **config.get("trl", {})}
        config.pop("trl", None)
    # Recipes of policies have no adapter, and the variants of other losses are other ones.
    other = "adapters." if is_policy else "loss.variant"
    names = {key: target for key, target in names.items() if not target.startswith(other)}
    targets = [names.get(key, "") for key, value in config.items() if value not in (None, -1)]
    lengths = tuple(part for part in ("trainer.", "lr.warmup") if any(target.startswith(part) for target in targets))
    by_recipe = tables["recipes"].get(imported.extends[0], {}) if framework == "trl" or is_policy else {}
    by_adapter = tables["recipes"]["use_peft"] if config.get("use_peft") else {}
    given = {**defaults, **by_recipe, **by_adapter, **config}
    for key, value in given.items():
        target, is_default = names.get(key), key not in config
        if is_default and str(target).startswith(lengths):
            continue
        if value is not None:
            _import_key(imported, key, value, target, f"default of {key}" if is_default else key)
    _set_batch_sizes(imported, given, names, ranks)
    for complete in (_complete_training, _complete_rows, _complete_from_torchtitan, _choose_overlays):
        complete(imported, given)
    return imported


def _import_key(imported: Imported, key: str, value: Any, target: str | None, comment: str) -> None:
    """Add a key to the recipe: as a value, an overlay, a note, or a key without a counterpart."""
    flavors = read_foreign_names()["flavors"].values()
    if target is None and key in ("model.name", "model.flavor") and imported.extends[0] in flavors:
        target = f"- the recipe {imported.extends[0]} is {value}"
    if target is None:
        imported.unmapped.append(f"{key} = {value!r}")
    elif target.startswith("- "):
        imported.notes.append(f"{key}: {target[2:]}")
    elif target.startswith("extends "):
        imported.extends += [target.removeprefix("extends ")] if value else []
    elif not target.startswith("batch."):  # a product of several keys
        own, _, factor = target.partition(" * ")
        try:
            converted = value * float(factor) if factor else _convert_value(own, key, value, imported.values)
        except (TypeError, ValueError, ArithmeticError):
            converted = None  # a value of another kind than the key's
        if converted is not None:
            imported.set_value(own, converted, comment)
        elif value not in WITHOUT_EFFECT:
            imported.unmapped.append(f"{key} = {value!r}")


WITHOUT_EFFECT = (-1, "steps", "lora", "qlora", True, False)
"""Values that need no line in a recipe if their setting has none: a choice of the base, or the default."""


def _choose_base(config: Settings, framework: str) -> str:
    """Return the shipped recipe nearest to a configuration."""
    if framework == "torchtitan":
        flavor = f"{config.get('model.name')}/{config.get('model.flavor')}".lower()
        return str(read_foreign_names()["flavors"].get(flavor, "pretrain_tokenized"))
    if config.keys() & {"num_generations", "reward_funcs", "scale_rewards"}:
        return "grpo"
    kind = str(config.get("rl") or ("dpo" if "beta" in config else "chat"))
    return kind if kind in ("dpo", "kto", "grpo") else "dpo" if kind in ("ipo", "orpo", "simpo") else "chat"


WITH_TOKENS = ("chat", "dpo", "kto")
"""Recipes with [tokens] in files, and with adapters."""

REFERENCE_FREE = ("loss.orpo", "loss.simpo", "loss.cpo")


def _convert_value(own: str, key: str, value: Any, values: Mapping[str, Any]) -> Any:
    """Return a setting's value, given the values before it, or None if there is none to write."""
    if key.endswith("_per_epoch"):
        return {"epochs": 1 / value} if value else "never"
    if own == "optimizer.betas":
        first, second = values.get(own, [0.9, 0.999])
        return [first, value] if key.endswith("2") else [value, second]
    choices = read_foreign_names()["choices"]
    choices = choices.get(key, choices.get(own, {}))
    if (part := choices.get(str(value).lower(), choices.get("other"))) is not None:
        return part or None
    convert = next((convert for pattern, convert in CONVERSIONS.items() if fnmatchcase(own, pattern)), None)
    if convert is not None:
        return convert(value)
    return None if value == -1 else value


def _convert_data_files(value: Any) -> list[Any] | None:
    entries = [dict(entry) if isinstance(entry, dict) else {"path": entry} for entry in value]
    paths = [entry.pop("path", None) for entry in entries]
    plain = read_foreign_names()["choices"]["tokens.paths"]
    is_plain = all(part in plain.get(key, ()) for entry in entries for key, part in entry.items())
    return paths if is_plain and all(str(path).endswith(tuple(plain["suffixes"])) for path in paths) else None


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "tokens.paths": _convert_data_files,
    "*.use": lambda value: find_own_component(str(value)),
    "mesh.*": lambda value: None if value in (-1, 1) else value,
    "adapters.lora.targets": lambda value: [value] if isinstance(value, str) else value,
    "*.every": lambda value: value if isinstance(value, int) and value > 0 else None,
    "run.name": str,
    "vars.base": str,
}
"""Conversions of values, by patterns of settings; the first match counts. Other values are copied."""


def _set_batch_sizes(imported: Imported, config: Settings, names: Mapping[str, str], ranks: int) -> None:
    """Set the rows of a microbatch and of a step: in other frameworks a product, and in GRPO of completions."""
    sizes = {key: config[key] for key in config if names.get(key, "").startswith("batch.")}
    if odd := [key for key in sizes if not isinstance(sizes[key], int)]:
        raise UserError(f"{odd[0]} is {sizes[odd[0]]!r}; write a number of rows or steps", 2)
    micro = next((sizes[key] for key in sizes if names[key] == "batch.micro_size"), 1)
    steps = sizes.get("gradient_accumulation_steps", 1)
    total, text = sizes.get("training.global_batch_size", -1), f"{micro} x {steps} x {ranks} ranks (--ranks)"
    total = total if total > 0 else micro * steps * ranks
    group = imported.values.get("rollout.group_size") if imported.extends[0] == "grpo" else None
    if isinstance(group, int):  # here rows are prompts
        micro, total, text = max(1, micro // group), max(1, total // group), f"{text} / {group} completions of a prompt"
    imported.set_value("batch.micro_size", micro, ", ".join(key for key in sizes if "global" not in key))
    imported.set_value("batch.global_size", total, text)


TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")


def _complete_training(imported: Imported, config: Settings) -> None:
    """Choose between steps and epochs, and add the trackers and an optimizer's state in 8 bits."""
    if "trainer.steps" in imported.values:  # of both, Trainer and axolotl take the steps
        imported.values.pop("trainer.epochs", None)
    is_evaluated = imported.framework != "trl" or config.get("eval_strategy", "no") not in ("no", False)
    if not is_evaluated and imported.extends[0] in WITH_TOKENS:
        imported.set_value("tokens.validation_fraction", 0.0, "eval_strategy")
    reported = config.get("report_to") or []
    names = [reported] if isinstance(reported, str) else [*reported]
    for name in [*names, *(["wandb"] if "trackers.wandb.project" in imported.values else [])]:
        if name in TRACKERS:
            imported.set_value(f"trackers.{name}.use", f"trackers.{name}", "report_to" if name in names else "")
        elif name != "none":
            imported.unmapped.append(f"report_to = {name!r}")
    if imported.values.get("optimizer.use") == "optim.stochastic_adamw":  # of optimizers in 8 bits, the only one
        imported.set_value("optimizer.state_dtype", "uint8", imported.comments["optimizer.use"])


def _complete_rows(imported: Imported, config: Settings) -> None:
    """Give padded rows and prompts their length; pairs and prompts have a packing of their own."""
    if imported.extends[0] not in ("chat", "pretrain_tokenized"):
        imported.values.pop("packing.use", None)
    if imported.values.get("packing.use") == "data.packing.padded":
        imported.set_value("packing.length", "$vars.length", "")
    if imported.extends[0] == "grpo":
        if config.get("max_prompt_length"):
            imported.set_value("vars.length", config["max_prompt_length"], "max_prompt_length")
        if "loss.clip_high" not in imported.values:
            imported.set_value("loss.clip_high", config["epsilon"], "epsilon")


def _complete_from_torchtitan(imported: Imported, config: Settings) -> None:
    """Leave out checkpoints and evaluations that are turned off; the schedule follows from its settings."""
    for key, foreign in (("checkpoint", "checkpoint"), ("evaluate", "validation")):
        if config.get(f"{foreign}.enable") is False:
            imported.set_value(f"{key}.every", "never", f"{foreign}.enable")
    if imported.framework == "torchtitan":
        use = "wsd" if "lr.decay_percent" in imported.values else imported.values.pop("lr.curve", "linear")
        imported.set_value("lr.use", f"learning_rate.{use}", "lr_scheduler")


def _choose_overlays(imported: Imported, config: Settings) -> None:
    """Extend the overlay for all weights, or for QLoRA, as the configuration has an adapter or none."""
    adapter = config.get("adapter") or config.get("use_peft")
    if adapter == "qlora":
        imported.extends.append("with_nf4")
    if not adapter and imported.extends[0] in WITH_TOKENS:
        needs_reference = imported.extends[0] != "chat" and imported.values.get("loss.use") not in REFERENCE_FREE
        imported.extends.append("with_all_weights_and_reference" if needs_reference else "with_all_weights")
