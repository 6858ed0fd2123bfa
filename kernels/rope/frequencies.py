"""
RoPE frequencies and RoPE scaling, which extends a trained model's context length.

Linear: Chen et al. 2023, arXiv 2306.15595. NTK: bloc97 2023, "NTK-aware scaled RoPE". YaRN: Peng et al. 2023, arXiv
2309.00071: channel pairs with many rotations within the original length keep their frequency, pairs with few have it
divided by the factor, and pairs in between are interpolated; attention is scaled as well. Llama 3: Grattafiori et al.
2024, arXiv 2407.21783: like YaRN with other bounds, without scaled attention. LongRoPE: Ding et al. 2024, arXiv
2402.13753: every pair has its own factors, one for short and one for long texts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearScaling:
    """Linear scaling, which divides every frequency by `factor`."""

    factor: float


@dataclass(frozen=True)
class NtkScaling:
    """
    NTK scaling, whose base grows so the lowest frequency is divided by `factor` and the highest does not change.

    Hugging Face's dynamic scaling by f, at s tokens for a model trained on m, is NTK scaling by f s / m - f + 1.
    """

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """
    Dynamic NTK scaling for rows by their length; rows up to the original length are not scaled.

    A row of s tokens (its largest position plus 1) is scaled by f s / m - f + 1, where f is `factor` and m is
    `original_max_position_embeddings`, in tokens. Cached keys keep the rotation for the s at their computation, as in
    transformers.
    """

    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """
    YaRN scaling: pairs with more than `beta_fast` rotations within the original length (tokens) keep their frequency.

    Pairs with fewer than `beta_slow` rotations have their frequency divided by `factor`, and pairs in between are
    interpolated linearly; `truncate` rounds the interpolated range's bounds outwards to whole pairs. `attention_factor`
    multiplies cos and sin; None is 0.1 ln(factor) + 1.
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
    Llama 3 scaling: pairs with fewer than `low_freq_factor` rotations have their frequency divided by `factor`.

    Rotations are within the original length, in tokens. Pairs with more than `high_freq_factor` rotations keep their
    frequency, and pairs in between are interpolated.
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class LongRopeScaling:
    """
    LongRoPE scaling: frequencies are divided by factors by pair, which depend on the length of a document.

    A document of more than `original_max_position_embeddings` tokens has the factors `long_factor`, other documents
    `short_factor`. `attention_factor` multiplies cos and sin. Cached keys keep the rotation for the length at their
    computation.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float = 1.0


Scaling = LinearScaling | NtkScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongRopeScaling | None


def rope_frequencies(
    rotary_dim: int, base: float, scaling: Scaling = None, device: torch.device | str | None = None
) -> Tensor:
    """
    Return radians per position by channel pair: float32 (rotary_dim // 2,).

    For dynamic scaling and LongRoPE, these are the frequencies up to the original length.
    """
    if isinstance(scaling, NtkScaling):
        base = compute_ntk_base(base, rotary_dim, scaling.factor)
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / base ** (pairs / rotary_dim)
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnScaling):
        return frequencies.lerp(
            frequencies / scaling.factor, _compute_yarn_interpolation_weights(rotary_dim, base, scaling, device)
        )
    if isinstance(scaling, Llama3Scaling):
        # Rotations within the original length, from 0 at low_freq_factor to 1 at high_freq_factor. They are rounded as
        # in transformers: between close bounds, the last bit of the rotations is several bits of the frequency.
        rotations = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
        kept = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        return (frequencies / scaling.factor).lerp(frequencies, kept.clamp(0, 1))
    if isinstance(scaling, LongRopeScaling):
        return frequencies / torch.tensor(scaling.short_factor, device=device)
    return frequencies


def compute_ntk_base(base: float, rotary_dim: int, factor: float) -> float:
    """Return the base whose unscaled frequencies equal NTK scaling by a factor."""
    return float(base * factor ** (rotary_dim / (rotary_dim - 2)))


def rope_attention_factor(scaling: Scaling) -> float:
    """Return the factor for cos and sin: attention_factor of YaRN and LongRoPE, or 1 for other methods."""
    if isinstance(scaling, LongRopeScaling):
        return scaling.attention_factor
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def compute_rope_cos_and_sin(
    positions: Tensor, rotary_dim: int, base: float, scaling: Scaling = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin by position and pair, float32 (..., rotary_dim // 2), for integer positions (...)."""
    if isinstance(scaling, DynamicScaling):
        frequencies = _compute_dynamic_frequencies_by_row(positions, rotary_dim, base, scaling)
    elif isinstance(scaling, LongRopeScaling):
        frequencies = _compute_longrope_frequencies_by_token(positions, rotary_dim, base, scaling)
    else:
        frequencies = rope_frequencies(rotary_dim, base, scaling, positions.device)
    angles = positions.unsqueeze(-1).to(torch.float32) * frequencies
    if scaling is None:
        return angles.cos(), angles.sin()
    sharpening = rope_attention_factor(scaling)
    return angles.cos() * sharpening, angles.sin() * sharpening


def _compute_dynamic_frequencies_by_row(
    positions: Tensor, rotary_dim: int, base: float, dynamic: DynamicScaling
) -> Tensor:
    """Return frequencies by row, (..., 1, rotary_dim // 2), which depend on the row's length."""
    # The code computes with tensors: only the device knows the positions, and reading them would synchronize.
    original_length = dynamic.original_max_position_embeddings
    length = (positions.amax(-1, keepdim=True) + 1).clamp(min=original_length)
    factor = dynamic.factor * length / original_length - (dynamic.factor - 1)
    bases = base * factor ** (rotary_dim / (rotary_dim - 2))
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device)
    return 1.0 / bases.unsqueeze(-1) ** (pairs / rotary_dim)


def _compute_longrope_frequencies_by_token(
    positions: Tensor, rotary_dim: int, base: float, scaling: LongRopeScaling
) -> Tensor:
    """Return frequencies by token, (..., length, rotary_dim // 2), which depend on the length of its document."""
    plain = rope_frequencies(rotary_dim, base, device=positions.device)
    short, long = (
        plain / torch.tensor(factors, device=positions.device)
        for factors in (scaling.short_factor, scaling.long_factor)
    )
    is_long = document_length_by_token(positions) > scaling.original_max_position_embeddings
    return torch.where(is_long.unsqueeze(-1), long, short)


def document_length_by_token(positions: Tensor) -> Tensor:
    """
    Return the length of each token's document: its last position plus 1, like positions (..., length).

    Positions grow inside a document, and restart in the next one.
    """
    length = positions.shape[-1]
    tokens = torch.arange(length, device=positions.device).expand(positions.shape)
    is_last = torch.ones_like(positions, dtype=torch.bool)
    is_last[..., :-1] = positions[..., 1:] <= positions[..., :-1]
    # The last token at or after each token, as a running minimum from the end.
    last = tokens.where(is_last, length).flip(-1).cummin(-1).values.flip(-1)
    return positions.gather(-1, last) + 1


def _compute_yarn_interpolation_weights(
    rotary_dim: int, base: float, yarn: YarnScaling, device: torch.device | str | None
) -> Tensor:
    """Return by pair how much the divided frequency counts against the original one, 0 to 1: (rotary_dim // 2,)."""
    first, last = (
        _find_pair_with_rotations(rotations, rotary_dim, base, yarn.original_max_position_embeddings)
        for rotations in (yarn.beta_fast, yarn.beta_slow)
    )
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    # The divisor 0.001 is from transformers, for a range of a single pair.
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device=device)
    return ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)


def _find_pair_with_rotations(rotations: float, rotary_dim: int, base: float, length: int) -> float:
    """Return the unrounded index of the pair with so many rotations within a length."""
    return rotary_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))
