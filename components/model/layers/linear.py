"""A linear layer that computes with the recipe's kernels."""

from torch import Tensor, nn

from drawloom.components.ports.model import Kernels


class Linear(nn.Linear):
    """x @ weight.T, without a bias; the weight is (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int, kernels: Kernels) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs), in the weight's dtype."""
        return self.kernels.linear(x, self.weight)
