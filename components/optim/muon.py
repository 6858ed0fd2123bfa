"""Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from drawloom.components.optim.adamw_step import ADAM_MOMENTS, WideGradientStep
from drawloom.components.optim.parameter_groups import (
    AdamGroup,
    agree_on_group_indices,
    create_param_groups,
    find_betas_fault,
    find_targets_fault,
)
from drawloom.components.optim.shared_matrices import SharedMatrices, count_orthogonalize_flops
from drawloom.components.optim.torch_optimizer import TorchOptimizer, create_fastest_adamw
from drawloom.components.ports.distributed import Group, Mesh
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.stages import Parameters, get_or_create_gradient
from drawloom.graph import above, at_least, between, component, setting

Adjustment = Literal["original", "match_rms_adamw"]


@component(reads=("gradients", "lr_factor?", "skip?"), writes=("weights", "lr"))
class Muon(TorchOptimizer):
    """
    Muon for the matrices of layers, and AdamW for the rest: embeddings, the head, norms and biases.

    A matrix's update is its orthogonalised momentum. If ranks share a matrix, one rank gathers the slices,
    orthogonalises the whole, and scatters the result. Every expert in a stack is a matrix; gate and up projections in
    one parameter are one matrix. In a model with a parametrization, a matrix's update is as large as that of the base
    model's matrix: both have the same spectral norm (Yang et al. 2023, arXiv 2310.17813, condition 1).
    """

    _scales_by_role: ClassVar[bool] = True

    parameters: Parameters
    mesh: Mesh
    lr: float = setting(check=above(0), doc="base learning rate for Muon and AdamW")
    targets: list[str] = setting(
        factory=lambda: ["*layers.*"],
        check=find_targets_fault,
        impact="incompatible",
        doc="name patterns (fnmatch) for Muon's matrices",
    )
    adjust_lr_fn: Adjustment = setting(
        default="match_rms_adamw",
        doc=(
            "learning-rate multiplier by matrix shape: match_rms_adamw is 0.2 * sqrt(max(rows, columns)), for "
            "updates as large as AdamW's; original is sqrt(max(1, rows / columns))"
        ),
    )
    momentum: float = setting(default=0.95, check=between(0, 1), doc="decay rate for Muon's running mean of gradients")
    nesterov: bool = setting(default=True, doc="mix the gradient into its running mean once more (Nesterov momentum)")
    ns_steps: int = setting(default=5, check=between(1, 1001), doc="Newton-Schulz iterations")
    betas: tuple[float, float] = setting(
        default=(0.9, 0.95), check=find_betas_fault, doc="decay rates for AdamW's two running means"
    )
    eps: float = setting(default=1e-8, check=above(0), doc="constant added to AdamW's denominator")
    maximize: bool = setting(default=False, doc="maximize the objective instead of minimizing it")
    weight_decay: float = setting(default=0.1, check=at_least(0), doc="decoupled weight decay coefficient")
    groups: list[AdamGroup] = setting(factory=list, doc="parameter groups with their own options; the first match wins")

    def moment_names_by_parameter(self) -> dict[str, Sequence[str]]:
        """Return one name for Muon's matrices, and AdamW's two names for other parameters."""
        matrices = self._find_muon_matrices()
        return {
            name: ("momentum_buffer",) if part in matrices else ADAM_MOMENTS
            for name, part in self.parameters.named_parameters()
        }

    def count_update_flops(self) -> float:
        """Return this rank's FLOPs for the orthogonalisation. Ranks with a common matrix split the work."""
        slices, matrices = self.parameters.parameter_slices(), self._find_muon_matrices()
        parts = ((slices[name], part) for name, part in self.parameters.named_parameters() if part in matrices)
        shapes = (tuple(part.shape) if tensor_slice is None else tensor_slice.shape for tensor_slice, part in parts)
        return sum(count_orthogonalize_flops(shape, self.ns_steps) for shape in shapes) / self._sharing_group.size

    @property
    def _sharing_group(self) -> Group:
        """Group with all ranks that have slices or copies of this rank's matrices."""
        return self.mesh.data_tensor_group

    def _create_optimizers(self) -> list[torch.optim.Optimizer]:
        """Create both optimizers, and plan which rank orthogonalises which matrices. A collective."""
        chosen = self._find_muon_matrices()
        groups = create_param_groups(self.parameters, self.groups, self.weight_decay, self.mesh, self.eps)
        muon_groups, adamw_groups = (
            [group | {"params": [part for part in group["params"] if (part in chosen) == wanted]} for group in groups]
            for wanted in (True, False)
        )
        for group in muon_groups:  # AdamW's rates shrink with the width; Muon's follow from the base model's shapes
            group["lr_multiplier"] *= group["width"]
            group["weight_decay"] /= group["width"]
        known = self.parameters.parameter_slices()
        matrices = {name: part for name, part in self.parameters.named_parameters() if part in chosen}
        slices = {name: known[name] or TensorSlice.whole(tuple(part.shape)) for name, part in matrices.items()}
        shared = SharedMatrices(slices, self._sharing_group)
        options = {"momentum": self.momentum, "nesterov": self.nesterov, "ns_steps": self.ns_steps}
        return [
            MuonStep(muon_groups, matrices, slices, shared, self.adjust_lr_fn, maximize=self.maximize, **options),
            create_fastest_adamw(adamw_groups, lr=self.lr, betas=self.betas, eps=self.eps, maximize=self.maximize),
        ]

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, MuonStep) and optimizer in self._streamed:
            self._streamed[optimizer].step(optimizer.update_momentum_and_keep_updates)
            optimizer.step()  # ranks exchange all matrices at once
        else:
            super()._step(optimizer)

    def _find_muon_matrices(self) -> set[nn.Parameter]:
        """Return the matrices that `targets` match. Raises UserError if a pattern matches no matrix."""
        roles = self.parameters.roles()
        matrices = [(name, part) for name, part in self.parameters.named_parameters() if roles[name].is_matrix]
        indices = agree_on_group_indices([name for name, _ in matrices], {"targets": self.targets}, self.mesh, "matrix")
        return {part for (_, part), index in zip(matrices, indices, strict=True) if index}


class MuonStep(WideGradientStep):
    """
    `torch.optim.Muon` for stacks and slices of matrices; a missing gradient counts as zeros.

    A step changes nothing if `found_inf`, float32 () on the weights' device, is not 0.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        named: dict[str, nn.Parameter],
        slices: dict[str, TensorSlice],
        shared: SharedMatrices,
        adjust_lr_fn: Adjustment,
        **defaults: Any,
    ) -> None:
        super().__init__(list(groups), {"lr": 0.0, **defaults})
        self._names = {parameter: name for name, parameter in named.items()}
        self._slices = slices
        self._shared = shared
        self._adjust = adjust_lr_fn
        self._updates: dict[str, Tensor] = {}

    @torch.no_grad()
    def update_momentum_and_keep_updates(self) -> None:
        """Update the running means of the parameters in `param_groups`, and keep their updates for `step`."""
        for group in self.param_groups:
            for part in group["params"]:
                self._updates[self._names[part]] = self._update_momentum_buffer(part, group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights, and all running means unless `update_momentum_and_keep_updates` has done it."""
        if not self._updates:
            self.update_momentum_and_keep_updates()
        updates, self._updates = self._updates, {}
        directions = self._shared.orthogonalize(updates, self.defaults["ns_steps"]) if updates else {}
        for group in self.param_groups:
            for part in group["params"]:
                name = self._names[part]
                shape = self._slices[name].shape
                rate = group["lr"] * _compute_lr_multiplier(self._adjust, shape, group["width"])
                updated = part * (1 - group["lr"] * group["weight_decay"])
                self._copy_unless_inf_found(part, updated.add_(directions[name], alpha=-rate))

    def _update_momentum_buffer(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Add the gradient to the momentum, and return the (Nesterov) momentum to orthogonalise."""
        state, gradient = self.state[parameter], get_or_create_gradient(parameter).to(parameter.dtype)
        gradient = -gradient if group["maximize"] else gradient
        mean: Tensor = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
        averaged = torch.lerp(mean, gradient, 1 - group["momentum"])
        self._copy_unless_inf_found(mean, averaged)
        return gradient.lerp(averaged, group["momentum"]) if group["nesterov"] else averaged

    def _copy_unless_inf_found(self, tensor: Tensor, value: Tensor) -> None:
        tensor.copy_(value if self.found_inf is None else torch.where(self.found_inf > 0, tensor, value))


def _compute_lr_multiplier(adjustment: Adjustment, shape: tuple[int, ...], width_ratio: float) -> float:
    """Return the learning-rate multiplier for whole matrices, `width_ratio` times as wide as the base's."""
    rows, columns = shape[-2:]
    if adjustment == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns) / width_ratio)
