"""Tokens one after another, each drawn from what the model expects."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from drawloom.components.ports.model import Shared


def generate(
    module: nn.Module,
    prompt: Sequence[int],
    *,
    tokens: int,
    context: int,
    end: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> Iterator[int]:
    """
    Up to `tokens` ids after `prompt`, until `end`; the model sees the last `context` ids of what there is.

    `temperature` 0 takes the likeliest token; `top_k` leaves only that many to draw from.
    """
    device = next(module.parameters()).device
    ids = list(prompt)
    for _ in range(tokens):
        window = torch.tensor([ids[-context:]], device=device)
        token = draw(_logits(module, window), temperature, top_k, generator)
        if token == end:
            return
        ids.append(token)
        yield token


def _logits(module: nn.Module, window: Tensor) -> Tensor:
    """What a whole model expects after a window of ids (1, length): (vocabulary,), float32 on the CPU."""
    positions = torch.arange(window.shape[1], device=window.device).unsqueeze(0)
    with torch.inference_mode():
        logits: Tensor = module(window, Shared(positions, torch.zeros_like(window)))
    return logits[0, -1].float().cpu()


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One id from logits (vocabulary,)."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=generator))
