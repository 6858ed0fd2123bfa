"""Autoregressive sampling from a model."""

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.distributed import Group
from drawloom.components.ports.model import BatchContext
from drawloom.components.ports.pipeline import Predictor


@attrs.frozen
class Sampler:
    """
    Continues prompts; all ranks of a pipeline call it, and all get the sampled tokens.

    The model sees the last `context` ids. `temperature` 0 is greedy, `top_k` restricts sampling to the k most likely
    tokens, and the id `end` ends a text.
    """

    model: Predictor
    pipeline: Group
    generator: torch.Generator
    end: int
    context: int = 256
    temperature: float = 0.8
    top_k: int | None = None

    def continued(self, prompt: Sequence[int], tokens: int) -> Iterator[int]:
        """Yield up to `tokens` ids after a prompt of at least one id, without the end."""
        ids = list(prompt)
        for _ in range(tokens):
            token = self._next(torch.tensor([ids[-self.context :]]))
            if token == self.end:
                return
            ids.append(token)
            yield token

    def _next(self, window: Tensor) -> int:
        positions = torch.arange(window.shape[1]).unsqueeze(0)
        # no key-value cache: samples are short, and the model has no other inference path
        logits = self.model.infer(window, BatchContext(positions, torch.zeros_like(window)))
        drawn = 0 if logits is None else draw(logits[0, -1].float().cpu(), self.temperature, self.top_k, self.generator)
        agreed = torch.tensor([drawn])
        self.pipeline.sum(agreed)  # a broadcast: only the last stage has logits, the other ranks have 0
        return int(agreed)


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Sample an id from logits: (vocab_size,), float32."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=generator))
