"""An embedding that computes with the recipe's kernels."""

from torch import Tensor, nn

from drawloom.components.ports.model import Kernels


class Embedding(nn.Embedding):
    """A vector for each token; int64 (...) to (..., width)."""

    def __init__(self, vocabulary: int, width: int, kernels: Kernels) -> None:
        super().__init__(vocabulary, width)
        self.kernels = kernels

    def forward(self, tokens: Tensor) -> Tensor:
        return self.kernels.embedding(tokens, self.weight)
