"""Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.optim.adamw_step import ADAM_MOMENTS, WideGradientStep, adamw
from drawloom.components.optim.parameter_groups import AdamGroup, check_betas, check_targets, decays, places_of
from drawloom.components.optim.shared_matrices import SharedMatrices, orthogonalize_flops
from drawloom.components.optim.torch_optimizer import TorchOptimizer
from drawloom.components.ports.distributed import Group, Mesh
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.stages import Parameters, gradient_of
from drawloom.graph import above, at_least, between, component, setting

Adjustment = Literal["original", "match_rms_adamw"]


@component(reads=("gradients", "lr_factor?", "skip?"), writes=("weights", "lr"))
class Muon(TorchOptimizer):
    """
    Muon for the matrices of layers, and AdamW for the rest: embeddings, the head, norms and biases.

    The update of a matrix is its momentum, orthogonalised; a matrix that ranks have slices of is brought to one of them
    for that. Stacked experts are a matrix each, and gate and up projections that are one parameter are one matrix.
    """

    parameters: Parameters
    mesh: Mesh
    lr: float = setting(check=above(0), doc="the base learning rate, of both")
    targets: list[str] = setting(
        factory=lambda: ["*layers.*"],
        check=check_targets,
        impact="incompatible",
        doc="patterns (fnmatch) of the names of the parameters whose matrices Muon trains",
    )
    adjust_lr_fn: Adjustment = setting(
        default="match_rms_adamw",
        doc="what the rate of a matrix is multiplied by: 0.2 * sqrt(max(rows, columns)), with which updates are as "
        "large as AdamW's, or, in the original, sqrt(max(1, rows / columns))",
    )
    momentum: float = setting(default=0.95, check=between(0, 1), doc="decay of Muon's running mean of gradients")
    nesterov: bool = setting(default=True, doc="whether the mean is taken one step further with the same gradient")
    ns_steps: int = setting(default=5, check=between(1, 1001), doc="iterations of the orthogonalisation")
    betas: tuple[float, float] = setting(
        default=(0.9, 0.95), check=check_betas, doc="decay of AdamW's two running means"
    )
    eps: float = setting(default=1e-8, check=above(0), doc="keeps AdamW's denominator from zero")
    maximize: bool = setting(default=False, doc="maximize the objective instead of minimizing it")
    weight_decay: float = setting(default=0.1, check=at_least(0), doc="decoupled weight decay coefficient")
    groups: list[AdamGroup] = setting(factory=list, doc="parameter groups with their own options; the first match wins")
    _optimizers: list[torch.optim.Optimizer] = attrs.field(init=False, factory=list)

    def moments(self) -> dict[str, Sequence[str]]:
        """Return the one mean of the matrices that Muon trains, and AdamW's two of other parameters."""
        of_muon = self._of_muon()
        return {
            name: ("momentum_buffer",) if part in of_muon else ADAM_MOMENTS for name, part in self.parameters.named()
        }

    def update_flops(self) -> float:
        """Those of Muon, of which ranks that have slices of the same matrices, or the same ones, have equal parts."""
        places, of_muon = self.parameters.slices(), self._of_muon()
        parts = ((places[name], part) for name, part in self.parameters.named() if part in of_muon)
        shapes = (tuple(part.shape) if place is None else place.shape for place, part in parts)
        return sum(orthogonalize_flops(shape, self.ns_steps) for shape in shapes) / self._sharing.size

    @property
    def _sharing(self) -> Group:
        """The ranks that differ in nothing but which slices they have of the same matrices."""
        return self.mesh.data_tensor_group

    def open(self) -> None:
        """Create both optimizers, and plan which rank orthogonalises which matrices."""
        of_muon, every = self._of_muon(), self._param_groups()
        ours, theirs = (
            [group | {"params": [part for part in group["params"] if (part in of_muon) == wanted]} for group in every]
            for wanted in (True, False)
        )
        places = self.parameters.slices()
        matrices = {name: part for name, part in self.parameters.named() if part in of_muon}
        slices = {name: places[name] or TensorSlice.whole(tuple(part.shape)) for name, part in matrices.items()}
        shared = SharedMatrices(slices, self._sharing)
        how = {"momentum": self.momentum, "nesterov": self.nesterov, "ns_steps": self.ns_steps}
        self._optimizers = [
            MuonStep(ours, matrices, slices, shared, self.adjust_lr_fn, maximize=self.maximize, **how),
            adamw(theirs, lr=self.lr, betas=self.betas, eps=self.eps, maximize=self.maximize),
        ]

    def _of_muon(self) -> set[nn.Parameter]:
        """Matrices with a name among `targets`. Raises UserError for a pattern that is the name of none."""
        matrices = [(name, part) for name, part in self.parameters.named() if decays(part)]
        places = places_of([name for name, _ in matrices], {"targets": self.targets}, self.mesh, "matrix")
        return {part for (_, part), place in zip(matrices, places, strict=True) if place}


class MuonStep(WideGradientStep):
    """
    The steps of `torch.optim.Muon`, on slices of matrices and stacks of them; a gradient that is None counts as zeros.

    A step with `found_inf`, float32 () on the device of the weights, that is not 0 changes nothing.
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

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights and means."""
        updates = {
            self._names[part]: self._averaged(part, group) for group in self.param_groups for part in group["params"]
        }
        directions = self._shared.orthogonalize(updates, self.defaults["ns_steps"]) if updates else {}
        for group in self.param_groups:
            for part in group["params"]:
                name = self._names[part]
                rate = group["lr"] * _adjusted(self._adjust, self._slices[name].shape)
                updated = part * (1 - group["lr"] * group["weight_decay"])
                self._assign(part, updated.add_(directions[name], alpha=-rate))

    def _averaged(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Add a gradient to its mean, and give what is to be orthogonalised."""
        state, gradient = self.state[parameter], gradient_of(parameter).to(parameter.dtype)
        gradient = -gradient if group["maximize"] else gradient
        mean: Tensor = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
        averaged = torch.lerp(mean, gradient, 1 - group["momentum"])
        self._assign(mean, averaged)
        return gradient.lerp(averaged, group["momentum"]) if group["nesterov"] else averaged

    def _assign(self, tensor: Tensor, value: Tensor) -> None:
        tensor.copy_(value if self.found_inf is None else torch.where(self.found_inf > 0, tensor, value))


def _adjusted(how: Adjustment, shape: tuple[int, ...]) -> float:
    """The factor of the rate of whole matrices (..., rows, columns)."""
    rows, columns = shape[-2:]
    return math.sqrt(max(1, rows / columns)) if how == "original" else 0.2 * math.sqrt(max(rows, columns))
