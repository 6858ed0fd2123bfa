"""How rotary positions are stretched for texts longer than a model was trained on, under Hugging Face's names."""

from collections.abc import Iterator
from typing import Literal

import attrs

from drawloom.components.model.qwen3.fault import Fault
from drawloom.graph import above, at_least, setting
from drawloom.kernels.rope_frequencies import Dynamic, Linear, Llama3, Scaling, Yarn

USED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""The keys that each `rope_type` takes."""

NEEDED = ("factor", "original_max_position_embeddings")
"""What has no default where it is used."""


@attrs.frozen(kw_only=True)
class RopeScaling:
    """`rope_scaling` or `rope_parameters` of a `config.json`; what is left out is as in transformers."""

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = setting(
        default="default", doc="how positions are stretched, see kernels/rope_frequencies.py; default: not"
    )
    rope_theta: float | None = setting(
        default=None, check=above(1), doc="base of rotary positions; may be written outside as well"
    )
    factor: float | None = setting(default=None, check=at_least(1), doc="how many times longer texts become")
    original_max_position_embeddings: int | None = setting(
        default=None, check=at_least(1), doc="longest text before, in tokens; dynamic takes max_position_embeddings"
    )
    beta_fast: float | None = setting(
        default=None, check=above(0), doc="yarn: turns of pairs that keep their speed; 32"
    )
    beta_slow: float | None = setting(
        default=None, check=above(0), doc="yarn: turns of pairs that are slowed in full; 1"
    )
    truncate: bool | None = setting(default=None, doc="yarn: whether the bounds are rounded to whole pairs; true")
    attention_factor: float | None = setting(
        default=None, check=above(0), doc="yarn: factor of cosines and sines; 0.1 ln(factor) + 1"
    )
    low_freq_factor: float | None = setting(
        default=None, check=above(0), doc="llama3: turns of pairs that are slowed in full; 1"
    )
    high_freq_factor: float | None = setting(
        default=None, check=above(0), doc="llama3: turns of pairs that keep their speed; 4"
    )

    def given(self) -> dict[str, float | bool]:
        """What is written of how positions are stretched, besides `rope_type`."""
        fields = ((field.name, getattr(self, field.name)) for field in attrs.fields(type(self)))
        return {name: value for name, value in fields if name not in ("rope_type", "rope_theta") and value is not None}


def scaling_of(rope: RopeScaling | None, max_positions: int) -> Scaling:
    """The kernels' form of it, for a model whose texts have at most this many tokens."""
    if rope is None:
        return None
    given = rope.given()
    length = {"length": int(given.pop("original_max_position_embeddings", max_positions))}
    if rope.rope_type == "linear":
        return Linear(given["factor"])
    made = {"dynamic": Dynamic, "yarn": Yarn, "llama3": Llama3}[rope.rope_type]
    return made(**given, **length)  # type: ignore[no-any-return]


def rope_faults(rope: RopeScaling, head_dim: int | None, key: str = "rope_scaling") -> Iterator[Fault]:
    """What the settings written under `key` can't be together."""
    given, used = rope.given(), USED[rope.rope_type]
    for name in given.keys() - set(used):
        owners = " and ".join(kind for kind, names in USED.items() if name in names)
        why = f"{key}.{name} belongs to {owners}, and this is {rope.rope_type}"
        yield Fault((key, name), why, f"remove {name}")
    if lacking := [name for name in NEEDED if name in used and name not in given]:
        why = f"{key} lacks {lacking[0]}, which {rope.rope_type} needs"
        example = "4.0" if lacking[0] == "factor" else "32768"
        yield Fault(key, why, f"write {lacking[0]} = {example}, say")
    for less, more in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
        values = {"beta_slow": 1.0, "beta_fast": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | given
        if (less in given or more in given) and values[less] >= values[more]:
            why = f"{key}.{more} = {values[more]:g} is not above {less} = {values[less]:g}"
            yield Fault((key, more if more in given else less), why, f"write {more} = {2 * values[less]:g}")
    if rope.rope_type == "dynamic" and head_dim == 2:
        why = f"{key}.rope_type = 'dynamic' slows all pairs but the first, and head_dim = 2 has one"
        yield Fault((key, "rope_type"), why, "write another rope_type")
