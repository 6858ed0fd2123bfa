"""Next-token prediction, the language modelling loss."""

from functools import partial

import torch
from torch import Tensor

from drawloom import at_least, between, component, setting
from drawloom.components.loss.decoder_inputs import DecoderInputs
from drawloom.ports import Head, LossSums, TokenBatch


@component
class NextToken(DecoderInputs):
    """
    Cross entropy of the next token, in nats, weighted by the batch's token weights.

    Named sums are `cross_entropy`, without label smoothing and z-loss, and if enabled `z_loss`, `accuracy` and
    `top_k_accuracy`.
    """

    z_loss: float = setting(
        "z-loss coefficient, of log(sum(exp(logits)))^2, to keep logits small; 0 is off", default=0.0, check=at_least(0)
    )
    label_smoothing: float = setting(
        "label smoothing: probability spread over the vocabulary", default=0.0, check=between(0, 1)
    )
    accuracy: bool = setting(
        "report the fraction of targets predicted as the likeliest token; costs one more product with the head",
        default=False,
        impact="safe",
    )

    top_k: int | None = setting(
        "report as `top_k_accuracy` the fraction of targets among the k likeliest tokens; default: off",
        default=None,
        impact="safe",
        check=at_least(1),
    )

    def loss(self, hidden: Tensor, head: Head, batch: TokenBatch) -> LossSums:
        """Return the loss sum, the token weight sum, and named sums; hidden is (rows, length, hidden_size)."""
        losses, lse = head.token_losses(hidden, batch.targets, batch.weights)
        total = losses.sum()
        sums = {"cross_entropy": total.detach()}
        if self.label_smoothing:
            # As in torch, the target distribution is a mixture of the target and a uniform distribution.
            uniform = ((lse - head.mean_logits(hidden)) * batch.weights).sum()
            total = (1 - self.label_smoothing) * total + self.label_smoothing * uniform
        if self.z_loss:
            # Chowdhery et al. 2022, "PaLM", section 5: z_loss = 1e-4 * log^2 Z.
            penalty = self.z_loss * (lse.square() * batch.weights).sum()
            total = total + penalty
            sums["z_loss"] = penalty.detach()
        with torch.no_grad():
            if self.accuracy:
                correct = head.map_logits(_mark_likeliest_targets, hidden, batch.targets)
                sums["accuracy"] = (correct * batch.weights).sum()
            if self.top_k is not None:
                correct = head.map_logits(partial(_mark_targets_among_k_likeliest, k=self.top_k), hidden, batch.targets)
                sums["top_k_accuracy"] = (correct * batch.weights).sum()
        return total, batch.weights.double().sum(), sums


def _mark_likeliest_targets(logits: Tensor, targets: Tensor) -> Tensor:
    """Return 1.0 where the target int64 (tokens,) has the greatest logit (tokens, vocabulary): float32 (tokens,)."""
    return (logits.argmax(-1) == targets).float()


def _mark_targets_among_k_likeliest(logits: Tensor, targets: Tensor, k: int) -> Tensor:
    """Return 1.0 where a target int64 (tokens,) has one of the k greatest logits (tokens, vocabulary), as float32."""
    # Equal logits are common in bfloat16; the lower id comes first, as in argmax.
    target = targets.clamp(min=0).unsqueeze(-1)
    logit, ids = logits.gather(-1, target), torch.arange(logits.shape[-1], device=logits.device)
    return (((logits > logit) | ((logits == logit) & (ids < target))).sum(-1) < k).float()
