"""From a recipe's settings to a model's config, with all problems in the settings."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from drawloom.components.model.decoder.config import DecoderConfig, derive_head_sizes, find_head_count_faults
from drawloom.components.model.decoder.hugging_face import Family, find_inconsistent_sizes, read_config
from drawloom.components.model.decoder.rope import (
    InvalidSetting,
    find_duplicate_rope_settings,
    find_rope_faults,
    separate_theta_and_scaling,
)
from drawloom.graph import UserError

EXAMPLES = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "intermediate_size": 768,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}


def find_setting_faults(family: Family, settings: Mapping[str, Any], has_tokenizer: bool) -> Iterator[InvalidSetting]:
    """Return problems in a recipe's settings; None stands for a setting left out."""
    given = _drop_unset_settings(family, settings)
    if settings["config"] is not None:
        yield from find_duplicate_rope_settings(given)
        return  # a config, which another machine may have, sets everything else
    needed = _list_required_keys(family)
    for key in needed:
        if key not in given:
            yield InvalidSetting(
                key, f"{key} is missing", f"write {key} = {EXAMPLES[key]}, for example, or config = a config.json"
            )
    if "vocab_size" not in given and not has_tokenizer:
        instead = "add a [tokenizer], or write the number of its ids: vocab_size = 50304, for example"
        yield InvalidSetting("vocab_size", "there is neither a vocabulary nor a tokenizer to ask for it", instead)
    if "hidden_size" in given and "num_attention_heads" in given:
        yield from _find_attention_faults(given)
    yield from find_duplicate_rope_settings(given)
    complete = family.constants | derive_head_sizes(given) | given
    rotary_dim = None
    if "head_dim" in complete:
        rotary_dim = int(complete["head_dim"] * complete.get("partial_rotary_factor", 1.0))
    for key in ("rope_scaling", "rope_parameters"):
        if key in given:
            yield from find_rope_faults(given[key], rotary_dim, key)
    if given.keys() >= set(needed):
        yield from family.config.find_faults(complete)


def build_architecture_from_settings(
    family: Family, settings: Mapping[str, Any], tokens: int | None, new_tokens: int = 0
) -> DecoderConfig:
    """
    Return the architecture for these settings, with `tokens` ids in the tokenizer; the last ones may be new.

    Raises UserError for invalid settings.
    """
    for fault in find_setting_faults(family, settings, tokens is not None):
        raise UserError(f"{fault.key}: {fault.why}; {fault.instead}")
    if settings["config"] is not None:
        architecture = _read_and_override_config(family, settings)
        for fault in find_inconsistent_sizes(architecture):
            raise UserError(f"{fault.key}: {fault.why}; {fault.instead}")
    else:
        try:
            architecture = family.config(**_fill_derived_defaults(family, settings, tokens))
        except ValueError as error:  # a derived default beyond its maximum
            raise UserError(f"{error}; write smaller sizes") from error
    if tokens is not None and tokens - new_tokens > (rows := architecture.vocab_size):
        why = f"the tokenizer has {tokens} ids, but the model's vocabulary only {rows}"
        added = f"new_tokens = {tokens - rows} for some that were added"
        key, instead = ("vocab_size", f"vocab_size = {tokens}") if settings["config"] is None else ("config", added)
        raise UserError(f"{key}: {why}; write {instead}, or another tokenizer")
    if tokens is not None and new_tokens >= tokens:
        raise UserError(
            f"new_tokens: {new_tokens} of the tokenizer's {tokens} ids can't all be added ones; write a smaller number"
        )
    return architecture


def _list_required_keys(family: Family) -> list[str]:
    """Return the keys without a default, constant or derived."""
    derived = {"num_key_value_heads", "head_dim", "vocab_size"}
    if "moe_intermediate_size" in family.keys:
        derived.add("intermediate_size")
    return [key for key, field in family.keys.items() if field.default is attrs.NOTHING and key not in derived]


def _drop_unset_settings(family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are keys of the family's `config.json` and not None."""
    return {key: settings[key] for key in (*family.keys, "rope_parameters") if settings[key] is not None}


def _fill_derived_defaults(family: Family, settings: Mapping[str, Any], tokens: int | None) -> dict[str, Any]:
    """Add defaults derived from other settings or the tokenizer's size; the config class has constant defaults."""
    given = _drop_unset_settings(family, settings)
    if tokens is not None:
        # A vocabulary that 64 or 128 divides makes the head's matrix products faster on GPUs.
        multiple = settings["vocabulary_multiple"]
        given.setdefault("vocab_size", -(-tokens // multiple) * multiple)
    if "moe_intermediate_size" in given:
        # The size of layers without experts: if it was left out there are none, and only exports show it.
        given.setdefault("intermediate_size", given["num_experts_per_tok"] * given["moe_intermediate_size"])
    return derive_head_sizes(given) | separate_theta_and_scaling(given)


def _read_and_override_config(family: Family, settings: Mapping[str, Any]) -> DecoderConfig:
    """Read the config file named in the settings, and override its values by the other settings."""
    given = _drop_unset_settings(family, settings)
    scaling = {"rope_scaling": None} if given.keys() & {"rope_scaling", "rope_parameters"} else {}
    return attrs.evolve(read_config(family, settings["config"]), **scaling | separate_theta_and_scaling(given))


def _find_attention_faults(given: Mapping[str, Any]) -> Iterator[InvalidSetting]:
    """Yield the fault if head counts or sizes do not fit together, or head_dim has no default."""
    width, heads = given["hidden_size"], given["num_attention_heads"]
    if "head_dim" not in given and width % heads:
        why = f"num_attention_heads = {heads} does not divide hidden_size = {width}, so head_dim has no default"
        yield InvalidSetting("num_attention_heads", why, "write head_dim = 64, for example")
        return
    yield from find_head_count_faults(
        heads, given.get("num_key_value_heads", heads), given.get("head_dim", width // heads)
    )
