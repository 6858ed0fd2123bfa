"""
Rotary position embeddings: base and scaling, from settings in either form: `rope_theta` and `rope_scaling`, or
transformers 5's `rope_parameters`, which holds both.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import attrs

from drawloom import above, at_least, between, setting
from drawloom.ports import Settings


@attrs.frozen
class InvalidSetting:
    """Invalid setting: its key, the reason, and the remedy."""

    key: str | tuple[str, ...]
    why: str
    instead: str


optional_setting = partial(setting, default=None)
"""Declare a setting that may be left out."""


@attrs.frozen(kw_only=True)
class RopeScaling:
    """`rope_scaling` or `rope_parameters` of a `config.json`; what is left out is as in transformers."""

    rope_type: Literal["default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"] = setting(
        "how positions are scaled, see kernels/rope/frequencies.py; default: not; ntk is exported as a larger "
        "rope_theta, for Hugging Face has no such type",
        default="default",
    )
    rope_theta: float | None = optional_setting(
        "base of rotary positions; may be written outside as well", check=above(1)
    )
    factor: float | None = optional_setting("how many times longer texts become", check=at_least(1))
    original_max_position_embeddings: int | None = optional_setting(
        "longest text before, in tokens; dynamic takes max_position_embeddings",
        check=between(1, 1_000_000_001),
    )
    beta_fast: float | None = optional_setting(
        "yarn: rotations over the original length from which on a pair is unscaled; 32", check=above(0)
    )
    beta_slow: float | None = optional_setting(
        "yarn: rotations over the original length up to which a pair is scaled in full; 1", check=above(0)
    )
    truncate: bool | None = optional_setting("yarn: whether the bounds are rounded to whole pairs; true")
    attention_factor: float | None = optional_setting(
        "yarn, longrope: factor of cosines and sines; yarn: 0.1 ln(factor) + 1; longrope: sqrt(1 + ln(f) / ln(o)), "
        "where o is original_max_position_embeddings and f is max_position_embeddings / o",
        check=above(0),
    )
    short_factor: list[float] | None = optional_setting(
        "longrope: divisors of frequencies, by pair, in documents up to the original length"
    )
    long_factor: list[float] | None = optional_setting(
        "longrope: divisors of frequencies, by pair, in longer documents"
    )
    mscale: float | None = optional_setting(
        "yarn: 0.1 mscale ln(factor) + 1 is the numerator of attention_factor; needs mscale_all_dim",
        check=above(0),
    )
    mscale_all_dim: float | None = optional_setting(
        "yarn: 0.1 mscale_all_dim ln(factor) + 1 is the denominator of attention_factor, and multiplies the scores "
        "of latent attention twice",
        check=above(0),
    )
    low_freq_factor: float | None = optional_setting(
        "llama3: rotations over the original length up to which a pair is scaled in full; 1",
        check=above(0),
    )
    high_freq_factor: float | None = optional_setting(
        "llama3: rotations over the original length from which on a pair is unscaled; 4", check=above(0)
    )

    def explicit_options(self) -> dict[str, Any]:
        """Return the keys with a value, without `rope_type` and `rope_theta`."""
        fields = ((field.name, getattr(self, field.name)) for field in attrs.fields(type(self)))
        return {name: value for name, value in fields if name not in ("rope_type", "rope_theta") and value is not None}


BY_LENGTH = ("dynamic", "longrope")
"""Scalings that depend on lengths of texts and on max_position_embeddings."""


def separate_theta_and_scaling(given: Settings) -> dict[str, Any]:
    """Return the settings with `rope_theta` and `rope_scaling` in place of `rope_parameters`."""
    rest = {key: value for key, value in given.items() if key not in ("rope_parameters", "rope_scaling")}
    rope = given.get("rope_parameters", given.get("rope_scaling"))
    if rope is None:
        return rest
    theta = {} if rope.rope_theta is None else {"rope_theta": rope.rope_theta}
    scaling = {} if rope.rope_type == "default" else {"rope_scaling": attrs.evolve(rope, rope_theta=None)}
    return rest | theta | scaling


def find_duplicate_rope_settings(given: Settings) -> Iterator[InvalidSetting]:
    """Yield the faults for settings given twice: in `rope_parameters` or `rope_scaling`, and outside it."""
    for key in ("rope_theta", "rope_scaling"):
        if key in given and "rope_parameters" in given:
            why = f"{key} is set beside rope_parameters, which sets it as well"
            yield InvalidSetting(key, why, f"remove {key} or rope_parameters")
    if "rope_theta" in given and "rope_scaling" in given and given["rope_scaling"].rope_theta is not None:
        why = "rope_scaling.rope_theta is set beside rope_theta, which is the same"
        yield InvalidSetting(("rope_scaling", "rope_theta"), why, "remove one of them")
