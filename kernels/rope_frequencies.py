"""
RoPE frequencies, and the methods of RoPE scaling, which extend the context length that a model was trained on.

Linear: Chen et al. 2023, arXiv 2306.15595. NTK: bloc97 2023, "NTK-aware scaled RoPE". YaRN: Peng et al. 2023,
arXiv 2309.00071: pairs of channels with many rotations within the original length keep their frequency, pairs with few
are divided by the factor, those between are interpolated; and attention is scaled. Llama 3: Grattafiori et al. 2024,
arXiv 2407.21783, the same with other bounds and without the scaling of attention.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class NtkScaling:
    """
    The base grows so that the lowest frequency is divided by `factor` and the highest stays.

    Hugging Face's dynamic scaling by f, at s tokens of a model trained on m, is NTK by f s / m - f + 1.
    """

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """
    Dynamic NTK: each row is scaled by its own length, not at all up to the original one.

    A row of s tokens (its largest position plus 1) is scaled by f s / m - f + 1, where f is `factor` and m is
    `original_max_position_embeddings`, in tokens. Cached keys stay rotated by the s of then, as in transformers.
    """

    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """
    YaRN: pairs with more than `beta_fast` rotations within the original length (in tokens) keep their frequency.

    Those with fewer than `beta_slow` are divided by `factor`, those between interpolated linearly; `truncate` rounds
    the range of these outwards to whole pairs. `attention_factor` multiplies cos and sin; None is 0.1 ln(factor) + 1.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None


@dataclass(frozen=True)
class Llama3Scaling:
    """
    Llama 3: pairs with fewer than `low_freq_factor` rotations within the original length are divided by `factor`.

    Those with more than `high_freq_factor` keep their frequency, those between are interpolated. Lengths in tokens.
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


Scaling = LinearScaling | NtkScaling | DynamicScaling | YarnScaling | Llama3Scaling | None


def rope_frequencies(
    rotary_dim: int, base: float, scaling: Scaling = None, device: torch.device | str | None = None
) -> Tensor:
    """
    Radians by which each pair of channels is rotated per position: float32 (rotary_dim // 2,).

    For dynamic scaling they are those up to the original length.
    """
    if isinstance(scaling, NtkScaling):
        base = scaled_base(base, rotary_dim, scaling.factor)
    frequencies = 1.0 / base ** _exponents(rotary_dim, device)
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnScaling):
        return frequencies.lerp(frequencies / scaling.factor, _slowed(rotary_dim, base, scaling, device))
    if isinstance(scaling, Llama3Scaling):
        # Rotations within the original length, from 0 at low_freq_factor to 1 at high_freq_factor.
        # Rounded as transformers does it: between near bounds, a last bit of the rotations is several of the frequency.
        rotations = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
        kept = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        return (frequencies / scaling.factor).lerp(frequencies, kept.clamp(0, 1))
    return frequencies


def scaled_base(base: float, rotary_dim: int, factor: float) -> float:
    """Return the base with which unscaled frequencies are those of NTK scaling by a factor."""
    return float(base * factor ** (rotary_dim / (rotary_dim - 2)))


def attention_scaling(scaling: Scaling) -> float:
    """The factor of cos and sin: YaRN's attention_factor, 1 for other methods."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def rope_angles(positions: Tensor, rotary_dim: int, base: float, scaling: Scaling = None) -> tuple[Tensor, Tensor]:
    """cos and sin by position and pair of channels: float32 (..., rotary_dim // 2) from integer positions (...)."""
    if isinstance(scaling, DynamicScaling):
        frequencies = _grown(positions, rotary_dim, base, scaling)
    else:
        frequencies = rope_frequencies(rotary_dim, base, scaling, positions.device)
    angles = positions.unsqueeze(-1).to(torch.float32) * frequencies
    sharpening = attention_scaling(scaling)
    return angles.cos() * sharpening, angles.sin() * sharpening


def _exponents(rotary_dim: int, device: torch.device | str | None) -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim


def _grown(positions: Tensor, rotary_dim: int, base: float, dynamic: DynamicScaling) -> Tensor:
    """Frequencies of each row, (..., 1, rotary_dim // 2), by its length."""
    # Tensor arithmetic throughout: only the device knows the positions, and reading them would synchronize.
    original_max_position_embeddings = (positions.amax(-1, keepdim=True) + 1).clamp(
        min=dynamic.original_max_position_embeddings
    )
    factor = dynamic.factor * original_max_position_embeddings / dynamic.original_max_position_embeddings - (
        dynamic.factor - 1
    )
    bases = base * factor ** (rotary_dim / (rotary_dim - 2))
    return 1.0 / bases.unsqueeze(-1) ** _exponents(rotary_dim, positions.device)


def _slowed(rotary_dim: int, base: float, yarn: YarnScaling, device: torch.device | str | None) -> Tensor:
    """The weight of the divided frequency for each pair, 0 to 1: (rotary_dim // 2,)."""
    first, last = (
        _pair_that_turns(times, rotary_dim, base, yarn.original_max_position_embeddings)
        for times in (yarn.beta_fast, yarn.beta_slow)
    )
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    # The divisor 0.001 is that of transformers, for a range of a single pair.
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device=device)
    return ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)


def _pair_that_turns(times: float, rotary_dim: int, base: float, original_max_position_embeddings: int) -> float:
    """The index, not rounded, of the pair with so many rotations within a length."""
    return rotary_dim * math.log(original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(base))
