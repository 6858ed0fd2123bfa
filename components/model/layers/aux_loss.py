"""
A pull towards experts that are used alike, for a router would otherwise come to know a few of them only.

The loss is that of Fedus et al. 2021 (arXiv 2101.03961, equations 4 to 6) in the form of Hugging Face: experts *
sum_e f_e P_e, where f_e is how many choices a token makes of expert e, and P_e its probability, both in the mean. The
mean is that of a row, as in DeepSeek-V3 (2024, arXiv 2412.19437, equations 17 to 20): so it does not matter how rows
are dealt out over microbatches and ranks.

Choices have no gradient, so the loss's is the same for all tokens of a row: it is added on the way back, where the
probabilities are, and no loss has to travel along with the hidden states.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function


def inject_aux_loss_grad(probabilities: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """
    The probabilities (rows, length, experts) as they are; backwards, with the gradient of each row's loss added.

    `chosen` are the experts of each token, (rows, length, choices), `weights` what each row's loss weighs, (rows,).
    """
    rows, length, experts = probabilities.shape
    slope = weights.to(probabilities.dtype) * (experts / max(length, 1) ** 2)
    pull = probabilities.new_zeros(rows, experts)
    pull.scatter_add_(1, chosen.flatten(1), slope.unsqueeze(1).expand(rows, length * chosen.shape[2]))
    return _Pulled.apply(probabilities, pull)  # type: ignore[no-untyped-call, no-any-return]


class _Pulled(Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, pull: Tensor) -> Tensor:
        ctx.save_for_backward(pull)
        return probabilities.view_as(probabilities)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (pull,) = ctx.saved_tensors
        return grad + pull.unsqueeze(1), None
