"""The loss of a language model: each token predicted from those before it."""

from functools import partial

import torch
from torch import Tensor

from drawloom.components.loss.decoder_inputs import DecoderInputs
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.model import Head
from drawloom.graph import at_least, between, component, setting


@component
class NextToken(DecoderInputs):
    """
    Cross entropy of the next token, in nats, each token's weighted by the batch.

    Named sums are `cross_entropy`, without smoothing and z-loss, and where they are on `z_loss`, `accuracy` and
    `top_k_accuracy`.
    """

    z_loss: float = setting(
        default=0.0, check=at_least(0), doc="coefficient of log(sum(exp(logits)))^2, which keeps logits small; 0 is off"
    )
    label_smoothing: float = setting(
        default=0.0, check=between(0, 1), doc="share of each target's probability that is spread over the vocabulary"
    )
    accuracy: bool = setting(
        default=False,
        impact="safe",
        doc="whether to count the targets that are likeliest, for one more product with the head",
    )

    top_k: int | None = setting(
        default=None,
        impact="safe",
        check=at_least(1),
        doc="count the targets that are among the k likeliest tokens, as `top_k_accuracy`; off if left out",
    )

    def loss(self, hidden: Tensor, head: Head, batch: TokenBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The sum of the tokens' losses, of their weights, and named sums; hidden is (rows, length, hidden_size)."""
        losses, lse = head.token_losses(hidden, batch.targets, batch.weights)
        total = losses.sum()
        sums = {"cross_entropy": total.detach()}
        if self.label_smoothing:
            # torch's definition: the cross entropy with a mixture of the target and all words alike.
            uniform = ((lse - head.mean_logits(hidden)) * batch.weights).sum()
            total = (1 - self.label_smoothing) * total + self.label_smoothing * uniform
        if self.z_loss:
            # Chowdhery et al. 2022, "PaLM", section 5: z_loss = 1e-4 * log^2 Z.
            penalty = self.z_loss * (lse.square() * batch.weights).sum()
            total = total + penalty
            sums["z_loss"] = penalty.detach()
        with torch.no_grad():
            if self.accuracy:
                correct = head.map_logits(_is_likeliest, hidden, batch.targets)
                sums["accuracy"] = (correct * batch.weights).sum()
            if self.top_k is not None:
                correct = head.map_logits(partial(_is_among_likeliest, k=self.top_k), hidden, batch.targets)
                sums["top_k_accuracy"] = (correct * batch.weights).sum()
        return total, batch.weights.double().sum(), sums


def _is_likeliest(logits: Tensor, targets: Tensor) -> Tensor:
    """1.0 where the target int64 (tokens,) has the greatest of the logits (tokens, vocabulary), float32 (tokens,)."""
    return (logits.argmax(-1) == targets).float()


def _is_among_likeliest(logits: Tensor, targets: Tensor, k: int) -> Tensor:
    """Return 1.0 where a target int64 (tokens,) has one of the k greatest logits (tokens, vocabulary), as float32."""
    # Of equal logits, which are common in bfloat16, the lower id comes first, as for argmax.
    target = targets.clamp(min=0).unsqueeze(-1)
    logit, ids = logits.gather(-1, target), torch.arange(logits.shape[-1], device=logits.device)
    return (((logits > logit) | ((logits == logit) & (ids < target))).sum(-1) < k).float()
