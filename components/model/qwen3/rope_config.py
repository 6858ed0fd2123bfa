"""
Rotary positions, the base and how they are stretched, from a `config.json` or from settings, in either form:
`rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`, which holds both.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from drawloom.components.model.qwen3.fault import Fault
from drawloom.components.model.qwen3.rope_scaling import USED, RopeScaling

BESIDES = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
"""Keys of `rope_parameters` that are no settings of a stretch."""


def rope_parameters_of(rope: RopeScaling | None, base: float) -> dict[str, Any]:
    """`rope_parameters` of a config; the base stands at its top, too, for older readers."""
    if rope is None:
        return {}
    given = rope.given()
    if rope.rope_type == "llama3":
        given = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | given  # transformers has no defaults for these
    return {"rope_parameters": {"rope_type": rope.rope_type, "rope_theta": base, **given}}


def take_apart(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with `rope_theta` and `rope_scaling` alone, whichever form they were given in."""
    rest = {key: value for key, value in given.items() if key not in ("rope_parameters", "rope_scaling")}
    rope = given.get("rope_parameters", given.get("rope_scaling"))
    if rope is None:
        return rest
    theta = {} if rope.rope_theta is None else {"rope_theta": rope.rope_theta}
    stretched = {} if rope.rope_type == "default" else {"rope_scaling": attrs.evolve(rope, rope_theta=None)}
    return rest | theta | stretched


def form_faults(given: Mapping[str, Any]) -> Iterator[Fault]:
    """What is given twice: by `rope_parameters`, or in `rope_scaling`, and outside it."""
    for key in ("rope_theta", "rope_scaling"):
        if key in given and "rope_parameters" in given:
            why = f"{key} stands beside rope_parameters, which gives it too"
            yield Fault(key, why, f"remove {key} or rope_parameters")
    if "rope_theta" in given and "rope_scaling" in given and given["rope_scaling"].rope_theta is not None:
        why = "rope_scaling.rope_theta stands beside rope_theta, which is the same"
        yield Fault(("rope_scaling", "rope_theta"), why, "remove one of them")


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
    given = {key: value for key, value in rope.items() if key not in BESIDES and value is not None}
    if kind not in list(USED):
        kinds = ", ".join(USED)
        raise ValueError(f"stretches rotary positions by {kind!r}, where only {kinds} can be built")
    used = USED.get(kind, ())
    if strange := [key for key in given if key not in used]:
        raise ValueError(f"says {strange[0]} of rotary positions of kind {kind!r}, which can't be built")
    if kind == "default":
        return None
    if "original_max_position_embeddings" in used:
        given.setdefault("original_max_position_embeddings", max_positions)
    return _made(kind, given)


def _made(kind: Any, given: Mapping[str, Any]) -> RopeScaling:
    """Of numbers of the right types."""
    for field in attrs.fields(RopeScaling):
        value = given.get(field.name)
        wanted = {"truncate": (bool,), "original_max_position_embeddings": (int,)}.get(field.name, (int, float))
        if value is not None and type(value) not in wanted:
            raise ValueError(f"says {field.name} = {value!r} of rotary positions, which is not {wanted[-1].__name__}")
    if "factor" not in given:
        raise ValueError(f"lacks the factor by which rotary positions are stretched ({kind!r})")
    try:
        return RopeScaling(rope_type=kind, **given)
    except ValueError as error:
        name, _, why = str(error).partition(": ")
        raise ValueError(f"says {name} of rotary positions, and {why}") from error
