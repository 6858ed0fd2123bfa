"""Token ids drawn from logits: the inverted cumulative distribution at a random number."""

import torch
from torch import Tensor

from drawloom.kernels.availability import why_no_triton


def draw_ids_logps_and_entropies(logits: Tensor, uniforms: Tensor, temperature: Tensor | None = None) -> Tensor:
    """
    Draw an id per row; return the ids, their log-probabilities and the distributions' entropies: float64 (rows, 3).

    logits: (rows, vocab_size); uniforms: float64 (rows,) in [0, 1); temperature: float32 (), or None for 1. A
    log-probability is NaN if a row's logits are not finite; -inf is an impossible id.
    """
    if logits.is_cuda and logits.dtype != torch.float64 and not why_no_triton(logits.device):
        from drawloom.kernels.sampling.triton import draw_ids_triton

        return draw_ids_triton(logits, uniforms, temperature)
    return draw_ids_eager(logits, uniforms, temperature)


def draw_ids_eager(logits: Tensor, uniforms: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Compute `draw_ids_logps_and_entropies` in plain torch, in float32 and with float64 sums."""
    logits = logits.float() if temperature is None else logits.float() / temperature
    logps = logits.log_softmax(-1)
    probabilities = logps.exp()
    cumulative = probabilities.double().cumsum(-1)
    thresholds = uniforms[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, thresholds, right=True).clamp_max(logits.shape[-1] - 1)
    entropies = -torch.where(probabilities > 0, probabilities * logps, 0.0).sum(-1)
    chosen = logps.gather(-1, ids)[:, 0] + 0.0 * logits.amax(-1)  # NaN and infinity spread
    return torch.stack([ids[:, 0].double(), chosen.double(), entropies.double()], 1)
