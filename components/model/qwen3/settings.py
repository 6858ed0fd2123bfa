"""From the settings of a recipe to an architecture, with everything that can be wrong on the way."""

from collections.abc import Iterator, Mapping
from typing import Any

from drawloom.components.model.qwen3.architecture import Architecture, Fault, head_faults
from drawloom.components.model.qwen3.hugging_face import read_config
from drawloom.graph import UserError

NEEDED = ("layers", "width", "heads", "feed_forward")
"""What has no default, with examples below; the vocabulary may come from a tokenizer."""

EXAMPLES = {"layers": 4, "width": 256, "heads": 8, "feed_forward": 768, "vocabulary": 320}

ARCHITECTURAL = (
    "layers",
    "width",
    "heads",
    "kv_heads",
    "head_dim",
    "feed_forward",
    "vocabulary",
    "tied",
    "max_positions",
    "rope_base",
    "norm_eps",
    "initial_std",
)
"""The settings that a config gives."""


def faults(settings: Mapping[str, Any], has_tokenizer: bool) -> Iterator[Fault]:
    """What is wrong with the settings of a recipe; a setting that is None was left out."""
    given = {key: settings[key] for key in ARCHITECTURAL if settings[key] is not None}
    if settings["config"] is not None:
        yield from _config_faults(settings, given)
        return
    for key in NEEDED:
        if key not in given:
            yield Fault(key, f"{key} is missing", f"write {key} = {EXAMPLES[key]}, say, or config = a config.json")
    if "vocabulary" not in given and not has_tokenizer:
        instead = f'write tokenizer = "@tokenizer", or vocabulary = {EXAMPLES["vocabulary"]}, say'
        yield Fault("vocabulary", "there is neither a vocabulary nor a tokenizer to ask for it", instead)
    if "width" in given and "heads" in given:
        yield from _attention_faults(given)


def choose_architecture(settings: Mapping[str, Any], tokens: int | None) -> Architecture:
    """The architecture that the settings ask for, with `tokens` ids in the tokenizer; UserError if there is none."""
    for fault in faults(settings, tokens is not None):
        raise UserError(f"model.qwen3.dense: {fault.why}; {fault.instead}")
    if settings["config"] is not None:
        architecture = read_config(settings["config"])
    else:
        architecture = Architecture(**_completed(settings, tokens))
    if tokens is not None and tokens > architecture.vocabulary:
        why = f"the tokenizer has {tokens} ids, but the model's vocabulary only {architecture.vocabulary}"
        raise UserError(f"model.qwen3.dense: {why}; write vocabulary = {tokens}, or another tokenizer")
    return architecture


def _completed(settings: Mapping[str, Any], tokens: int | None) -> dict[str, Any]:
    """Settings with what was left out filled in, except what the architecture has defaults for."""
    given = {key: settings[key] for key in ARCHITECTURAL if settings[key] is not None}
    if tokens is not None:
        given.setdefault("vocabulary", _rounded_up(tokens, settings["vocabulary_multiple"]))
    return {"kv_heads": given["heads"], "head_dim": given["width"] // given["heads"], **given}


def _config_faults(settings: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Fault]:
    for key in given:
        yield Fault(key, f"{key} stands beside config, which gives it too", f"remove {key} or config")
    try:
        read_config(settings["config"])
    except UserError as error:
        why, _, instead = str(error).rpartition("; ")
        yield Fault("config", why, instead)


def _attention_faults(given: Mapping[str, Any]) -> Iterator[Fault]:
    width, heads = given["width"], given["heads"]
    if "head_dim" not in given and width % heads:
        why = f"heads = {heads} does not divide width = {width}, so head_dim has no default"
        yield Fault("heads", why, "write head_dim = 64, say")
        return
    yield from head_faults(heads, given.get("kv_heads", heads), given.get("head_dim", width // heads))


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
