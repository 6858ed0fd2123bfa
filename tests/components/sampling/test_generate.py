"""Autoregressive sampling."""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from torch import Tensor, nn

from drawloom.components.data.bytes import Bytes
from drawloom.components.ports.model import KeyValueCache, TokenContext
from drawloom.components.sampling.generate import Sampler, draw_id, stream_decoded_text
from drawloom.graph import UserError
from support.chat import open_tokenizer, tokenizer_folder
from support.qwen3 import dense, logits_of, sparse, whole


class Successor:
    """A model that predicts the next number, modulo five."""

    def __init__(self) -> None:
        self.longest = 0

    def infer(self, tokens: Tensor, shared: TokenContext) -> Tensor:
        self.longest = max(self.longest, tokens.shape[1])
        return nn.functional.one_hot((tokens + 1) % 5, 5).float() * 10


def draw_continuation(model: Any, mesh: Any, **changes: Any) -> list[int]:
    """Return the continuation of 0."""
    options: dict[str, Any] = {"context": 3, "ends": frozenset({4}), "temperature": 0.0, **changes}
    tokens = options.pop("tokens", 6)
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(model=model, pipeline=mesh.pipeline_group, generator=generator, **options)
    return list(sampler.sample_continuation([0], tokens))


def test_greedy_sampling_stops_at_the_end(one_rank: Any) -> None:
    """At temperature 0 each token is the most likely one, and the end token ends the text without being in it."""
    assert draw_continuation(Successor(), one_rank) == [1, 2, 3]


def test_the_model_sees_no_more_than_the_context(one_rank: Any) -> None:
    """A long text is truncated to its last tokens."""
    model = Successor()
    assert len(draw_continuation(model, one_rank, ends=frozenset({9}))) == 6 and model.longest == 3


@attrs.define
class Whole:
    """A model in one process that counts its computed tokens."""

    module: nn.Module
    cached: bool
    computed: int = 0
    logits: list[Tensor] = attrs.field(factory=list)

    def infer(self, tokens: Tensor, shared: TokenContext) -> Tensor:
        self.computed += tokens.shape[1]
        with torch.inference_mode():
            logits: Tensor = logits_of(self.module, tokens, shared if self.cached else attrs.evolve(shared, cache=None))
        self.logits.append(logits[0, -1])
        return logits


@pytest.mark.parametrize("family", [dense, sparse])
def test_a_text_has_the_same_logits_with_and_without_a_cache(family: Any, one_rank: Any) -> None:
    """Up to the context every token is computed once; beyond it, the model's whole window is computed again."""
    torch.manual_seed(0)
    module = whole(family())
    one, other = Whole(module, True), Whole(module, False)
    texts = [draw_continuation(model, one_rank, context=5, ends=frozenset(), tokens=7) for model in (one, other)]
    assert texts[0] == texts[1]
    for logits, wanted in zip(one.logits, other.logits, strict=True):
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    assert (one.computed, other.computed) == (5 + 5 * 2, 1 + 2 + 3 + 4 + 5 + 5 * 2)


def test_a_full_cache_takes_no_more() -> None:
    """More tokens than its capacity are an error, and not lost."""
    cache = KeyValueCache(2)
    with pytest.raises(ValueError, match="3 tokens do not fit into a cache of 2"):
        cache.extend(torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_without_finite_numbers_is_refused_in_a_sentence(temperature: float, one_rank: Any) -> None:
    """A diverged model gives nan, from which neither the greedy nor a random choice is a token."""
    broken = mock.Mock(infer=lambda tokens, shared: torch.full((1, tokens.shape[1], 5), math.nan))
    with pytest.raises(UserError, match="no text can be sampled: the model's logits are not finite"):
        draw_continuation(broken, one_rank, temperature=temperature)


def test_a_temperature_near_zero_draws_the_most_likely() -> None:
    """The quotient of a logit by the temperature may be more than a float32 can hold."""
    for temperature in (1e-30, 1e-300, 5e-324):
        assert draw_id(torch.tensor([1.0, 3.0, 2.0]), temperature, None, torch.Generator()) == 1


def test_draws_follow_the_distribution() -> None:
    """Frequencies are near the softmax of the logits at the temperature, restricted to the top k."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    counts = torch.bincount(torch.tensor([draw_id(logits, 0.5, 2, generator) for _ in range(4000)]), minlength=4)
    expected = torch.softmax(torch.tensor([2.0, 4.0]), 0)
    torch.testing.assert_close(counts[1:3] / 4000, expected, atol=0.02, rtol=0)
    assert counts[0] == counts[3] == 0


def test_streamed_pieces_add_up_to_the_text(tmp_path: Path) -> None:
    """Pieces come as soon as their characters are complete, also if a character has several tokens."""
    texts = ["héllo 😀 wörld", "", "a"]
    chat = open_tokenizer(tokenizer_folder(tmp_path / "tokenizer"))
    for tokenizer in (Bytes(), chat):
        for text in texts:
            assert "".join(stream_decoded_text(tokenizer, tokenizer.encode(text).tolist())) == text
    assert list(stream_decoded_text(Bytes(), [*"é".encode(), 97, 0xF0, 0x9F])) == ["é", "a", "\ufffd"]
    numbers = torch.randint(0, chat.vocab_size, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    assert "".join(stream_decoded_text(chat, numbers)) == chat.decode(numbers)
    unread = iter([97, 98])
    assert next(stream_decoded_text(Bytes(), unread)) == "a" and [*unread] == [98]
