"""Autoregressive sampling (text generation)."""

from collections.abc import Iterable, Iterator, Sequence

import attrs
import torch
from torch import Tensor

from drawloom import UserError
from drawloom.ports import Executor, Group, KeyValueCache, TokenContext, Tokenizer

# Smallest divisor of float32 logits; lower temperatures also draw the most likely token.
MIN_TEMPERATURE = 1e-30

BROKEN = -1
"""Value in place of an id, on all ranks, if the logits are not finite."""


@attrs.frozen
class Sampler:
    """
    Sampler for prompt continuations. All pipeline ranks call it, and all get the sampled tokens.

    The model sees the last `context` ids. Up to this length every id passes the model once, because keys and values
    are cached; a longer text needs a pass over `context` ids per token. `temperature` 0 is greedy, `top_k` restricts
    sampling to the k most likely tokens, and every id in `ends` ends a text.
    """

    model: Executor
    pipeline: Group
    generator: torch.Generator
    ends: frozenset[int]
    context: int = 256
    temperature: float = 0.8
    top_k: int | None = None

    def sample_continuation(self, prompt: Sequence[int], tokens: int) -> Iterator[int]:
        """
        Yield up to `tokens` ids after a prompt of at least one id, without the end id.

        Raises UserError on all ranks if the logits are not finite.
        """
        ids, cache = list(prompt), KeyValueCache(self.context)
        for _ in range(tokens):
            token = self._sample_next_id(ids, cache)
            if token in self.ends:
                return
            ids.append(token)
            yield token

    def _sample_next_id(self, ids: list[int], cache: KeyValueCache) -> int:
        """Sample the next id, the same on all ranks. Raises UserError if the logits are not finite."""
        # A text that is longer than the context moves by one position per token, so cached keys would be wrong.
        fits = len(ids) <= self.context
        window, first = (ids[cache.length :], cache.length) if fits else (ids[-self.context :], 0)
        logits = self._compute_logits(window, first, cache if fits else None)
        drawn = (
            0 if logits is None else draw_id(logits[0, -1].float().cpu(), self.temperature, self.top_k, self.generator)
        )
        sums = torch.tensor([drawn, cache.cached_layer_count])
        self.pipeline.sum(sums)  # only the last stage has logits, and the other ranks add 0
        token, layers = sums.tolist()
        if token == BROKEN:
            raise UserError("no text can be sampled: the model's logits are not finite; use an earlier checkpoint")
        if fits and layers:  # a plugin's model may not use the cache
            cache.end_pass(len(window))
        return int(token)

    def _compute_logits(self, ids: list[int], first: int, cache: KeyValueCache | None) -> Tensor | None:
        """
        Compute logits (1, tokens, vocab_size) for ids from position `first` on; None on ranks without the last stage.
        """
        window = torch.tensor([ids])
        positions = torch.arange(first, first + len(ids)).unsqueeze(0)
        return self.model.infer(window, TokenContext(positions, torch.zeros_like(window), cache=cache))


def stream_decoded_text(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """
    Yield the text of ids as they come; the pieces add up to the text of all ids.

    A piece waits until its characters are complete, because a token may end inside a character's bytes.
    """
    # A piece is decoded after the ids of the previous one, since decoders may strip a space from the first token.
    window: list[int] = []
    shown_count = 0
    for token in ids:
        window.append(token)
        shown, text = tokenizer.decode(window[:shown_count]), tokenizer.decode(window)
        if len(text) > len(shown) and not text.endswith("\ufffd"):
            yield text[len(shown) :]
            window, shown_count = window[shown_count:], len(window) - shown_count
    if rest := tokenizer.decode(window)[len(tokenizer.decode(window[:shown_count])) :]:
        yield rest


def draw_id(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Sample an id from logits: (vocab_size,), float32; return BROKEN if they are not finite."""
    if not (largest := logits.max()).isfinite():  # the maximum is NaN if any logit is
        return BROKEN
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    scaled = (logits - largest) / max(temperature, MIN_TEMPERATURE)  # at most 0, so exp can't overflow
    return int(torch.multinomial(torch.softmax(scaled, dim=0), 1, generator=generator))
