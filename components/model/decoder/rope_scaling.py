"""Scaled rotary positions: a setting's form in kernels, its faults, and attention's factors."""

import math
from collections.abc import Iterator
from typing import Any

from drawloom.components.model.decoder.rope import InvalidSetting, RopeScaling
from drawloom.kernels.rope import frequencies
from drawloom.ports import ConfigJson

USED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings", "attention_factor"),
}
"""The keys that each `rope_type` takes."""

NEEDED = {
    "factor": "4.0",
    "original_max_position_embeddings": "32768",
    "short_factor": "a list with a number for each rotated pair",
    "long_factor": "a list with a number for each rotated pair",
}
"""Keys without a default, with an example of a value."""


def convert_to_kernel_scaling(rope: RopeScaling, max_positions: int) -> frequencies.Scaling:
    """Convert a scaling to the kernels' form, for a model with this max_position_embeddings."""
    given = rope.explicit_options()
    if rope.rope_type not in ("linear", "ntk"):
        length = given.setdefault("original_max_position_embeddings", max_positions)
    if rope.rope_type == "longrope":
        given |= {key: tuple(given[key]) for key in ("short_factor", "long_factor")}
        given.setdefault("attention_factor", longrope_attention_factor(max_positions / length, length))
    numerator, denominator = given.pop("mscale", None), given.pop("mscale_all_dim", None)
    if numerator and denominator:
        above, below = (_compute_yarn_attention_factor(given["factor"], scale) for scale in (numerator, denominator))
        given.setdefault("attention_factor", above / below)
    scalings: Any = {
        "linear": frequencies.LinearScaling,
        "ntk": frequencies.NtkScaling,
        "dynamic": frequencies.DynamicScaling,
        "yarn": frequencies.YarnScaling,
        "llama3": frequencies.Llama3Scaling,
        "longrope": frequencies.LongRopeScaling,
    }
    return scalings[rope.rope_type](**given)  # type: ignore[no-any-return]


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """Return LongRoPE's factor for cosines and sines in a context `factor` times as long as the original one."""
    return math.sqrt(1 + math.log(factor) / math.log(original_length)) if factor > 1 else 1.0


def _compute_yarn_attention_factor(factor: float, mscale: float) -> float:
    """Return YaRN's attention factor, 0.1 * mscale * log(factor) + 1; 1 for factors up to 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def latent_score_multiplier(rope: RopeScaling | None) -> float:
    """Return latent attention's factor for scores, by which DeepSeek-V3 corrects YaRN for channels not rotated."""
    if rope is None or rope.mscale_all_dim is None or rope.factor is None:
        return 1.0
    return _compute_yarn_attention_factor(rope.factor, rope.mscale_all_dim) ** 2


def find_rope_faults(rope: RopeScaling, rotary_dim: int | None, key: str = "rope_scaling") -> Iterator[InvalidSetting]:
    """Yield invalid combinations in the settings under `key`, for heads with `rotary_dim` rotated channels if known."""
    given, used = rope.explicit_options(), USED[rope.rope_type]
    for name in given.keys() - set(used):
        *firsts, last = (kind for kind, names in USED.items() if name in names)
        owners = f"{', '.join(firsts)} and {last}" if firsts else last
        why = f"{key}.{name} belongs to {owners}, and this is {rope.rope_type}"
        yield InvalidSetting((key, name), why, f"remove {name}")
    if lacking := [name for name in NEEDED if name in used and name not in given]:
        why = f"{key} lacks {lacking[0]}, which {rope.rope_type} needs"
        yield InvalidSetting(key, why, f"write {lacking[0]} = {NEEDED[lacking[0]]}, for example")
    for name in ("short_factor", "long_factor"):
        factors = given.get(name, [])
        if name in used and factors and rotary_dim is not None and len(factors) != rotary_dim // 2:
            why = f"{key}.{name} has {len(factors)} numbers, and {rotary_dim // 2} pairs of channels are rotated"
            yield InvalidSetting((key, name), why, f"write {rotary_dim // 2} numbers")
        elif wrong := [factor for factor in factors if factor <= 0]:
            yield InvalidSetting((key, name), f"{key}.{name} has {wrong[0]:g}", "write numbers above 0")
    # Between the two bounds a linear ramp blends scaled and unscaled pairs, so they must differ.
    for less, more in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
        values = {"beta_slow": 1.0, "beta_fast": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | given
        if (less in given or more in given) and values[less] >= values[more]:
            why = f"{key}.{more} = {values[more]:g} is not above {less} = {values[less]:g}"
            yield InvalidSetting((key, more if more in given else less), why, f"write {more} = {2 * values[less]:g}")
    if rope.rope_type in ("ntk", "dynamic") and rotary_dim == 2:
        why = f"{key}.rope_type = {rope.rope_type!r} scales all pairs but the first, and head_dim = 2 has one"
        yield InvalidSetting((key, "rope_type"), why, "write another rope_type")


def build_rope_parameters(rope: RopeScaling, base: float, head_dim: int) -> ConfigJson:
    """Return `rope_parameters` for a config, repeating `rope_theta` at the top; for static NTK only `rope_theta`."""
    given = rope.explicit_options()
    if rope.rope_type == "ntk":
        return {"rope_theta": frequencies.compute_ntk_base(base, head_dim, given["factor"])}
    if rope.rope_type == "llama3":
        given = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | given  # transformers has no defaults for these
    return {"rope_parameters": {"rope_type": rope.rope_type, "rope_theta": base, **given}}
