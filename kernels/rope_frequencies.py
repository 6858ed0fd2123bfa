"""
How fast each pair of channels turns, and the ways to stretch that over longer texts than a model was trained on.

Linear: Chen et al. 2023, arXiv 2306.15595. NTK: bloc97 2023, "NTK-aware scaled RoPE". YaRN: Peng et al. 2023,
arXiv 2309.00071: pairs that turn often within the trained length keep their speed, those that hardly turn are slowed
down by the whole factor, those between in part; and attention becomes a little sharper. Llama 3: Grattafiori et al.
2024, arXiv 2407.21783, the same with other bounds and without the sharpening.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Linear:
    """Every pair turns `factor` times slower."""

    factor: float


@dataclass(frozen=True)
class Ntk:
    """
    The base grows so that the slowest pair turns `factor` times slower, and the fastest as before.

    Hugging Face's dynamic scaling by f, at s tokens of a model trained on m, is that of factor f s / m - f + 1.
    """

    factor: float


@dataclass(frozen=True)
class Dynamic:
    """
    NTK by as much as each row needs: nothing up to the trained `length` (in tokens), and from there on more and more.

    At s tokens, s the largest position of the row and 1, the base grows as for a factor of f s / length - f + 1.
    """

    factor: float
    length: int


@dataclass(frozen=True)
class Yarn:
    """
    Between `fast` and `slow` turns within the trained `length` (in tokens), pairs go over from their speed to a slower.

    `whole` rounds the range of these pairs outwards. `sharpening` multiplies cosines and sines; 0.1 ln(factor) + 1 if
    left out.
    """

    factor: float
    length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None


@dataclass(frozen=True)
class Llama3:
    """
    Pairs that turn less than `low` times within the trained `length` (in tokens) turn `factor` times slower.

    Those that turn more than `high` times keep their speed, and those between go over from one to the other.
    """

    factor: float
    length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


Scaling = Linear | Ntk | Dynamic | Yarn | Llama3 | None


def rope_frequencies(
    channels: int, base: float, scaling: Scaling = None, device: torch.device | str | None = None
) -> Tensor:
    """
    Radians that each pair of channels turns by from one position to the next: float32 (channels // 2,).

    For dynamic scaling they are those of texts no longer than the trained ones.
    """
    if isinstance(scaling, Ntk):
        base *= scaling.factor ** (channels / (channels - 2))
    frequencies = 1.0 / base ** _exponents(channels, device)
    if isinstance(scaling, Linear):
        return frequencies / scaling.factor
    if isinstance(scaling, Yarn):
        return frequencies.lerp(frequencies / scaling.factor, _slowed(channels, base, scaling, device))
    if isinstance(scaling, Llama3):
        kept = (frequencies * (scaling.length / (2 * math.pi)) - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        return (frequencies / scaling.factor).lerp(frequencies, kept.clamp(0, 1))
    return frequencies


def attention_scaling(scaling: Scaling) -> float:
    """What cosines and sines are multiplied by."""
    if not isinstance(scaling, Yarn):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def rope_angles(positions: Tensor, channels: int, base: float, scaling: Scaling = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines by position and pair of channels: float32 (..., channels // 2) from integers (...)."""
    if isinstance(scaling, Dynamic):
        frequencies = _grown(positions, channels, base, scaling)
    else:
        frequencies = rope_frequencies(channels, base, scaling, positions.device)
    angles = positions.unsqueeze(-1).to(torch.float32) * frequencies
    sharpening = attention_scaling(scaling)
    return angles.cos() * sharpening, angles.sin() * sharpening


def _exponents(channels: int, device: torch.device | str | None) -> Tensor:
    return torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels


def _grown(positions: Tensor, channels: int, base: float, dynamic: Dynamic) -> Tensor:
    """Frequencies of each row, (..., 1, channels // 2), from its length, which only the device knows."""
    length = (positions.amax(-1, keepdim=True) + 1).clamp(min=dynamic.length)
    factor = dynamic.factor * length / dynamic.length - (dynamic.factor - 1)
    bases = base * factor ** (channels / (channels - 2))
    return 1.0 / bases.unsqueeze(-1) ** _exponents(channels, positions.device)


def _slowed(channels: int, base: float, yarn: Yarn, device: torch.device | str | None) -> Tensor:
    """How far each pair has gone over to the slower speed, 0 to 1."""
    first, last = (_pair_that_turns(times, channels, base, yarn.length) for times in (yarn.beta_fast, yarn.beta_slow))
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    pairs = torch.arange(channels // 2, dtype=torch.float32, device=device)
    return ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)


def _pair_that_turns(times: float, channels: int, base: float, length: int) -> float:
    """The number of the pair that turns so many times within a length, between whole ones."""
    return channels * math.log(length / (times * 2 * math.pi)) / (2 * math.log(base))
