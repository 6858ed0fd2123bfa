"""Rotary positions as a `config.json` has them: the base, and how they are stretched, in older forms and the newest."""

from collections.abc import Mapping
from typing import Any

import attrs

from drawloom.components.model.qwen3.rope_scaling import USED, RopeScaling

THEIRS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
}
"""Our names to Hugging Face's."""

BESIDES = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
"""Keys of `rope_parameters` that are no settings of a stretch."""


def rope_parameters_of(rope: RopeScaling | None, base: float) -> dict[str, Any]:
    """`rope_parameters` of a config; the base stands at its top, too, for older readers."""
    if rope is None:
        return {}
    told = {THEIRS[name]: value for name, value in rope.told().items()}
    if rope.kind == "llama3":
        told = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | told  # transformers has no defaults for these
    return {"rope_parameters": {"rope_type": rope.kind, "rope_theta": base, **told}}


def read_rope(config: Mapping[str, Any]) -> tuple[Any, RopeScaling | None]:
    """The base, None if it is nowhere, and how positions are stretched; ValueError says what can't be built."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError("has rope_scaling that is no object")
    for part in (rope, config):
        if part.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise ValueError(
                "turns a part of each head only (partial_rotary_factor), where only the whole can be built"
            )
    base = rope.get("rope_theta", config.get("rope_theta"))
    return base, _scaling(rope, config.get("max_position_embeddings"))


def _scaling(rope: Mapping[str, Any], max_positions: Any) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    told = {key: value for key, value in rope.items() if key not in BESIDES and value is not None}
    if kind not in ("default", *USED):
        kinds = ", ".join(USED)
        raise ValueError(f"stretches rotary positions by {kind!r}, where only default, {kinds} can be built")
    used = USED.get(kind, ())
    ours = {theirs: name for name, theirs in THEIRS.items() if name in used}
    if strange := [key for key in told if key not in ours]:
        raise ValueError(f"says {strange[0]} of rotary positions of kind {kind!r}, which can't be built")
    if kind == "default":
        return None
    if "original_max_position_embeddings" in used:
        told.setdefault(THEIRS["original_max_position_embeddings"], max_positions)
    return _made(kind, {ours[key]: value for key, value in told.items()})


def _made(kind: Any, told: Mapping[str, Any]) -> RopeScaling:
    """Of numbers of the right types."""
    for field in attrs.fields(RopeScaling):
        value = told.get(field.name)
        wanted = {"truncate": (bool,), "original_max_position_embeddings": (int,)}.get(field.name, (int, float))
        if value is not None and type(value) not in wanted:
            raise ValueError(
                f"says {THEIRS[field.name]} = {value!r} of rotary positions, which is not {wanted[-1].__name__}"
            )
    if "factor" not in told:
        raise ValueError(f"lacks the factor by which rotary positions are stretched ({kind!r})")
    try:
        return RopeScaling(kind=kind, **told)
    except ValueError as error:
        name, _, why = str(error).partition(": ")
        raise ValueError(f"says {THEIRS[name]} of rotary positions, and {why}") from error
