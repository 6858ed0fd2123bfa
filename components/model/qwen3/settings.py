"""From the settings of a recipe to an architecture, with everything that can be wrong on the way."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from drawloom.components.model.qwen3.config import (
    Architecture,
    SparseArchitecture,
    expert_faults,
    has_experts,
    head_faults,
)
from drawloom.components.model.qwen3.family import Family
from drawloom.components.model.qwen3.fault import Fault
from drawloom.components.model.qwen3.hugging_face import read_config
from drawloom.components.model.qwen3.rope_scaling import rope_faults
from drawloom.graph import UserError

EXAMPLES = {
    "layers": 4,
    "width": 256,
    "heads": 8,
    "feed_forward": 768,
    "vocabulary": 320,
    "experts": 16,
    "experts_per_token": 2,
    "expert_feed_forward": 128,
}

BESIDE_CONFIG = ("balance",)
"""What may be written beside a config, and is then meant instead of what that says: it makes no other model."""


def faults(family: Family, settings: Mapping[str, Any], has_tokenizer: bool) -> Iterator[Fault]:
    """What is wrong with the settings of a recipe; a setting that is None was left out."""
    given = _given(family, settings)
    if settings["config"] is not None:
        yield from _config_faults(family, settings, given)
        return
    for key in family.needed:
        if key not in given:
            yield Fault(key, f"{key} is missing", f"write {key} = {EXAMPLES[key]}, say, or config = a config.json")
    if "vocabulary" not in given and not has_tokenizer:
        instead = f'write tokenizer = "@tokenizer", or vocabulary = {EXAMPLES["vocabulary"]}, say'
        yield Fault("vocabulary", "there is neither a vocabulary nor a tokenizer to ask for it", instead)
    if "width" in given and "heads" in given:
        yield from _attention_faults(given)
    if "rope_scaling" in given:
        yield from rope_faults(given["rope_scaling"], given.get("head_dim"))
    if family.architecture is SparseArchitecture and given.keys() >= set(family.needed):
        yield from _expert_faults(given)


def choose_architecture(family: Family, settings: Mapping[str, Any], tokens: int | None) -> Architecture:
    """The architecture that the settings ask for, with `tokens` ids in the tokenizer; UserError if there is none."""
    for fault in faults(family, settings, tokens is not None):
        raise UserError(f"{family.component}: {fault.why}; {fault.instead}")
    if settings["config"] is not None:
        beside = {key: value for key, value in _given(family, settings).items() if key in BESIDE_CONFIG}
        architecture = attrs.evolve(read_config(family, settings["config"]), **beside)
    else:
        architecture = family.architecture(**_completed(family, settings, tokens))
    if tokens is not None and tokens > architecture.vocabulary:
        why = f"the tokenizer has {tokens} ids, but the model's vocabulary only {architecture.vocabulary}"
        raise UserError(f"{family.component}: {why}; write vocabulary = {tokens}, or another tokenizer")
    return architecture


def _given(family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in family.settings if settings[key] is not None}


def _completed(family: Family, settings: Mapping[str, Any], tokens: int | None) -> dict[str, Any]:
    """Settings with what was left out filled in, except what the architecture has defaults for."""
    given = _given(family, settings)
    if tokens is not None:
        given.setdefault("vocabulary", _rounded_up(tokens, settings["vocabulary_multiple"]))
    if "experts_per_token" in given:  # of layers without experts, which there are none if it was left out
        given.setdefault("feed_forward", given["experts_per_token"] * given["expert_feed_forward"])
    return {"kv_heads": given["heads"], "head_dim": given["width"] // given["heads"], **given}


def _config_faults(family: Family, settings: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Fault]:
    for key in (key for key in given if key not in BESIDE_CONFIG):
        yield Fault(key, f"{key} stands beside config, which gives it too", f"remove {key} or config")
    try:
        read_config(family, settings["config"])
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


def _expert_faults(given: Mapping[str, Any]) -> Iterator[Fault]:
    layers, step, dense = given["layers"], given.get("sparse_step", 1), given.get("dense_layers", ())
    found = list(expert_faults(layers, given["experts"], given["experts_per_token"], step, dense))
    yield from found
    first = next((number for number in range(layers) if not has_experts(number, step, dense)), None)
    if first is not None and "feed_forward" not in given and not found:
        why = f"feed_forward is missing, and layer {first} has no experts"
        yield Fault("feed_forward", why, f"write feed_forward = {EXAMPLES['feed_forward']}, say")


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
