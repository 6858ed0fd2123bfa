"""The numbers that make one Qwen3 model differ from another, and which of them can't go together."""

from collections.abc import Iterator

import attrs


@attrs.frozen(kw_only=True)
class Architecture:
    """All that is needed to build a Qwen3 dense model; sizes count channels, heads, layers or token ids."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool = False
    max_positions: int = 32_768
    rope_base: float = 1e6
    norm_eps: float = 1e-6
    initial_std: float = 0.02


@attrs.frozen
class Fault:
    """Why a setting can't be what it is, and what to write instead."""

    key: str
    why: str
    instead: str


def head_faults(heads: int, kv_heads: int, head_dim: int) -> Iterator[Fault]:
    """What is wrong with the sizes of attention."""
    if heads % kv_heads:
        whole = [number for number in range(1, heads + 1) if heads % number == 0]
        why = f"kv_heads = {kv_heads} does not divide heads = {heads}"
        yield Fault("kv_heads", why, f"write one of {', '.join(map(str, whole))}")
    if head_dim % 2:
        why = f"head_dim = {head_dim} is odd, and rotary positions turn channels in pairs"
        yield Fault("head_dim", why, f"write {head_dim + 1}")
