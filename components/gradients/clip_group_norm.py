"""Gradient clipping by a parameter group's p-norm."""

import math
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from drawloom import UserError, above, at_least, component, internal, setting
from drawloom.kernels.gradients.eager import scale_and_sum_squares
from drawloom.ports import Device, Parameters, Reduce, Step, get_or_create_gradient


@component(changes=("gradients",))
class ClipGroupNorm:
    """
    Clipping for a parameter group: scales its gradients by one factor to a total norm of at most `max_norm`.

    The norm is (sum of |g|^p)^(1/p) over all elements in the group on all ranks, and the largest |g| for p = inf. Use
    one component per group. On a GPU the host does not wait.
    """

    parameters: Parameters
    reduce: Reduce
    device: Device
    max_norm: float = setting("maximum group norm after clipping", check=above(0))
    norm_type: float | Literal["inf"] = setting(
        'norm order p; "inf" for the largest magnitude', default=2.0, check=at_least(1)
    )
    targets: list[str] = setting("parameter name patterns (fnmatch)", factory=lambda: ["*"])
    _checked: bool = internal(False)

    def run_phase(self, step: Step) -> None:
        """Scale the group's gradients by max_norm / norm if that is below 1. Raises UserError if no name matches."""
        factor = self.max_norm / (self._compute_norm_over_ranks() + 1e-6)
        group = [
            part.grad
            for name, part in self.parameters.named_parameters()
            if self._is_clipped(name) and part.grad is not None
        ]
        scale_and_sum_squares(group, factor.clamp_max(1.0))

    def _compute_norm_over_ranks(self) -> Tensor:
        """Return the group's norm over all ranks, float64 ()."""
        gradients = [
            get_or_create_gradient(part) for name, part in self.parameters.owned_parameters() if self._is_clipped(name)
        ]
        if not self._checked:
            self._check_patterns_match_on_any_rank(len(gradients))
        filled = [gradient for gradient in gradients if gradient.numel()]  # a rank may have an empty slice
        p = float(self.norm_type)
        norms = torch.stack([*torch._foreach_norm(filled, p, dtype=torch.float64)]) if filled else self._create_zeros(1)
        if math.isinf(p):
            return self.reduce.max_over_ranks(norms.amax())
        return self.reduce.sum_over_ranks(norms.pow(p).sum()).pow(1 / p)

    def _check_patterns_match_on_any_rank(self, count: int) -> None:
        """Raise UserError if the patterns match no parameter on any rank."""
        total = self.reduce.sum_over_ranks(self._create_zeros(1) + count)
        if not total.item():
            name = next((name for name, _ in self.parameters.named_parameters()), "")
            raise UserError(
                f"clipping: no trained parameter matches {self.targets}; write patterns of names such as {name!r}", 2
            )
        self._checked = True

    def _create_zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device.device)

    def _is_clipped(self, name: str) -> bool:
        return any(fnmatchcase(name, target) for target in self.targets)
