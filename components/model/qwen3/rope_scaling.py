"""How rotary positions are stretched for texts longer than a model was trained on, as a recipe says it."""

from collections.abc import Iterator
from typing import Literal

import attrs

from drawloom.components.model.qwen3.fault import Fault
from drawloom.graph import above, at_least, setting
from drawloom.kernels.rope_frequencies import Dynamic, Linear, Llama3, Scaling, Yarn

USED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""What each kind is told."""

NEEDED = ("factor", "original_max_position_embeddings")
"""What has no default where it is used."""


@attrs.frozen(kw_only=True)
class RopeScaling:
    """A way to stretch rotary positions; what is left out is as in transformers."""

    kind: Literal["linear", "dynamic", "yarn", "llama3"] = setting(doc="how; see kernels/rope_frequencies.py")
    factor: float = setting(check=at_least(1), doc="how many times longer texts become")
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

    def told(self) -> dict[str, float | bool]:
        """What it was told besides its kind."""
        fields = ((field.name, getattr(self, field.name)) for field in attrs.fields(type(self)))
        return {name: value for name, value in fields if name != "kind" and value is not None}


def scaling_of(rope: RopeScaling | None, max_positions: int) -> Scaling:
    """What kernels call it, for a model whose texts have so many tokens at most."""
    if rope is None:
        return None
    told = rope.told()
    length = {"length": int(told.pop("original_max_position_embeddings", max_positions))}
    if rope.kind == "linear":
        return Linear(rope.factor)
    made = {"dynamic": Dynamic, "yarn": Yarn, "llama3": Llama3}[rope.kind]
    return made(**told, **length)  # type: ignore[no-any-return]


def rope_faults(rope: RopeScaling, head_dim: int | None) -> Iterator[Fault]:
    """What the settings of a stretch can't be together."""
    told, used = rope.told(), USED[rope.kind]
    for name in told.keys() - set(used):
        owners = " and ".join(kind for kind, names in USED.items() if name in names)
        why = f"rope_scaling.{name} belongs to {owners}, and this is {rope.kind}"
        yield Fault(("rope_scaling", name), why, f"remove {name}")
    if lacking := [name for name in NEEDED if name in used and name not in told]:
        why = f"rope_scaling lacks {lacking[0]}, which {rope.kind} needs"
        yield Fault("rope_scaling", why, f"write {lacking[0]} = 32768, say")
    for less, more in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
        values = {"beta_slow": 1.0, "beta_fast": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | told
        if (less in told or more in told) and values[less] >= values[more]:
            why = f"rope_scaling.{more} = {values[more]:g} is not above {less} = {values[less]:g}"
            yield Fault(("rope_scaling", more if more in told else less), why, f"write {more} = {2 * values[less]:g}")
    if rope.kind == "dynamic" and head_dim == 2:
        why = "rope_scaling.kind = 'dynamic' slows all pairs but the first, and head_dim = 2 has one"
        yield Fault(("rope_scaling", "kind"), why, "write another kind")
