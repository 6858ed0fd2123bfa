"""An embedding that computes with the recipe's kernels."""

from torch import Tensor, nn

from drawloom.components.ports.model import Kernels


class Embedding(nn.Embedding):
    """The embedding table: a vector, a row of `weight` (vocab_size, hidden_size), for each token."""

    def __init__(self, vocabulary: int, width: int, kernels: Kernels) -> None:
        super().__init__(vocabulary, width)
        self.kernels = kernels

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids, int64 (...), to vectors (..., hidden_size) of the weight's dtype."""
        return self.kernels.embedding(tokens, self.weight)
