"""Frequencies of rotary positions against transformers."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drawloom.kernels.rope.frequencies import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    Scaling,
    YarnScaling,
    compute_rope_cos_and_sin,
    rope_attention_factor,
    rope_frequencies,
)


def transformers_frequencies(
    kind: str, channels: int, base: float, length: int | None = None, **parameters: Any
) -> tuple[Any, float]:
    """Return the inverse frequencies and the attention factor of transformers."""
    from transformers import Qwen3Config  # takes seconds
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Qwen3Config(
        head_dim=channels,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": kind, "rope_theta": base, **parameters},
    )
    actual: tuple[Any, float] = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), length)
    return actual


channels = st.integers(2, 64).map(lambda half: 2 * half)
bases = st.sampled_from([1e4, 5e5, 1e6])
factors = st.sampled_from([1.0, 2.0, 4.0, 8.5])


@given(channels, bases, factors, st.sampled_from([2048, 32768]))
def test_yarn_equals_transformers(channels: int, base: float, factor: float, length: int) -> None:
    """Frequencies and attention factor equal transformers' with its defaults."""
    actual = rope_frequencies(channels, base, YarnScaling(factor, length))
    expected, attention = transformers_frequencies(
        "yarn", channels, base, factor=factor, original_max_position_embeddings=length
    )
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=0)
    assert rope_attention_factor(YarnScaling(factor, length)) == pytest.approx(attention)


def test_yarn_settings_equal_transformers() -> None:
    """Range, truncation and attention factor mean the same as in transformers."""
    yarn = YarnScaling(4.0, 4096, beta_fast=16, beta_slow=2, truncate=False, attention_factor=1.25)
    own: dict[str, Any] = {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.25}
    expected, attention = transformers_frequencies(
        "yarn", 64, 1e4, factor=4.0, original_max_position_embeddings=4096, **own
    )
    torch.testing.assert_close(rope_frequencies(64, 1e4, yarn), expected, rtol=2e-6, atol=0)
    assert rope_attention_factor(yarn) == attention


@settings(max_examples=20)
@given(channels, bases, factors)
def test_linear_scaling_equals_transformers(channels: int, base: float, factor: float) -> None:
    """Linear scaling equals transformers'."""
    expected, attention = transformers_frequencies("linear", channels, base, factor=factor)
    torch.testing.assert_close(rope_frequencies(channels, base, LinearScaling(factor)), expected, rtol=2e-6, atol=0)
    assert rope_attention_factor(LinearScaling(factor)) == attention


@settings(max_examples=20)
@given(channels, bases, factors, st.sampled_from([32768, 50000, 131072]))
def test_ntk_equals_dynamic_scaling_at_a_length(channels: int, base: float, factor: float, length: int) -> None:
    """Dynamic scaling in transformers, at a length, is NTK scaling by a factor that depends on the length."""
    expected, attention = transformers_frequencies("dynamic", channels, base, length, factor=factor)
    actual = rope_frequencies(channels, base, NtkScaling(factor * length / 32768 - factor + 1))
    torch.testing.assert_close(actual, expected, rtol=4e-6, atol=0)
    assert rope_attention_factor(NtkScaling(factor)) == attention


@settings(max_examples=20)
@given(channels, bases, factors, st.sampled_from([1, 7, 32, 33, 50, 131]))
def test_dynamic_scaling_depends_on_the_row_alone(channels: int, base: float, factor: float, length: int) -> None:
    """A row's angles equal dynamic scaling in transformers at the row's length, beside any other rows."""
    expected, _ = transformers_frequencies("dynamic", channels, base, max(length * 1024, 1), factor=factor)
    positions = torch.stack([torch.arange(1024) * length + length - 1, torch.arange(1024)])
    cos, sin = compute_rope_cos_and_sin(positions, channels, base, DynamicScaling(factor, 32768))
    angles = (positions[0, :, None] * expected).double()
    torch.testing.assert_close(cos[0].double(), angles.cos(), rtol=0, atol=2e-2)  # positions reach 130 thousand
    torch.testing.assert_close(sin[0].double(), angles.sin(), rtol=0, atol=2e-2)
    assert torch.equal(cos[1], compute_rope_cos_and_sin(positions[1:], channels, base)[0][0])


@given(channels, bases, factors, st.sampled_from([2048, 8192]), st.sampled_from([(1.0, 4.0), (0.5, 9.0), (2.0, 2.5)]))
@example(62, 5e5, 8.5, 2048, (2.0, 2.5))
def test_llama3_equals_transformers(
    channels: int, base: float, factor: float, length: int, bounds: tuple[float, float]
) -> None:
    """Frequencies equal transformers', and attention is not scaled."""
    low, high = bounds
    names: dict[str, Any] = {"low_freq_factor": low, "high_freq_factor": high}
    names["original_max_position_embeddings"] = length
    expected, attention = transformers_frequencies("llama3", channels, base, factor=factor, **names)
    scaling = Llama3Scaling(factor, length, low, high)
    torch.testing.assert_close(rope_frequencies(channels, base, scaling), expected, rtol=2e-6, atol=0)
    assert rope_attention_factor(scaling) == attention


def test_ntk_slows_the_slowest_pair_by_the_factor() -> None:
    """The first pair keeps its frequency, and the frequency of the last pair is divided by `factor`."""
    plain, slowed = rope_frequencies(64, 1e4), rope_frequencies(64, 1e4, NtkScaling(4.0))
    assert slowed[0] == plain[0]
    assert slowed[-1] == pytest.approx(plain[-1].item() / 4)


@pytest.mark.parametrize("scaling", [None, LinearScaling(2.0), YarnScaling(4.0, 64), Llama3Scaling(8.0, 64)])
def test_angles_are_positions_times_frequencies(scaling: Scaling) -> None:
    """Angles are position times frequency, and cos and sin are multiplied by the attention factor."""
    positions = torch.tensor([[0, 1, 2, 0, 1], [5, 3, 900, 1, 0]])
    cos, sin = compute_rope_cos_and_sin(positions, 8, 1e4, scaling)
    assert cos.shape == sin.shape == (2, 5, 4)
    assert cos.dtype == torch.float32
    frequency, sharpening = rope_frequencies(8, 1e4, scaling)[1].item(), rope_attention_factor(scaling)
    assert cos[1, 2, 1].item() == pytest.approx(sharpening * math.cos(900 * frequency), abs=1e-4)
    assert sin[1, 1, 1].item() == pytest.approx(sharpening * math.sin(3 * frequency), abs=1e-4)
