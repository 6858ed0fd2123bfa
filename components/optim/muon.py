"""
Muon: momentum, orthogonalised; one rank gathers a shared matrix's slices and scatters the result.

Jordan et al. 2024, "Muon", https://kellerjordan.github.io/posts/muon; Liu et al. 2025, "Muon is Scalable for LLM
Training", arXiv 2502.16982, section 2.3, algorithm 1.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, ClassVar, Literal

import attrs
import torch
from torch import Tensor, nn

from drawloom import above, at_least, between, component, setting
from drawloom.components.optim.gradient_steps import ADAM_MOMENTS, WideGradientStep
from drawloom.components.optim.parameter_groups import AdamGroup, find_betas_fault, find_targets_fault
from drawloom.components.optim.torch_groups import agree_on_group_indices
from drawloom.components.optim.torch_optimizer import TorchOptimizer, create_fastest_adamw
from drawloom.ports import Group, Mesh, Parameters, TensorSlice, get_or_create_gradient

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def orthogonalize(matrices: Tensor, ns_steps: int) -> Tensor:
    """
    Return matrices with about the same singular vectors and singular values near 1: (..., rows, columns), bfloat16.

    The algorithm is a quintic Newton-Schulz iteration, as in `torch.optim.Muon`, for matrix stacks.
    """
    if not matrices.numel():
        return matrices.bfloat16()
    a, b, c = COEFFICIENTS
    flat: Tensor = matrices.bfloat16() if matrices.ndim == 2 else matrices.bfloat16().flatten(0, -3)
    add_product = torch.addmm if flat.ndim == 2 else torch.baddbmm
    wide = flat.mT if flat.shape[-2] > flat.shape[-1] else flat
    # The iteration converges if no singular value is above 1.
    x: Tensor = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(ns_steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide is flat else x.mT).reshape(matrices.shape)


def count_orthogonalize_flops(shape: Sequence[int], ns_steps: int) -> float:
    """Return `orthogonalize`'s floating-point operations for matrices with a shape."""
    *stack, small, large = *shape[:-2], *sorted(shape[-2:])
    return ns_steps * prod(stack) * (4.0 * small**2 * large + 2.0 * small**3)


@attrs.frozen(eq=False)
class _Share:
    """
    Matrices orthogonalised on the rank `owner`: the box `region` of a parameter.

    `parts` are the region's overlaps with the ranks' slices, None without overlap.
    """

    name: str
    region: TensorSlice
    owner: int
    parts: Sequence[TensorSlice | None]

    @property
    def sender_ranks(self) -> list[int]:
        """Return the ranks that send parts to the owner: for every missing part the first rank with it."""
        first: dict[TensorSlice, int] = {}
        for rank, part in enumerate(self.parts):
            if part is not None:
                first.setdefault(part, rank)
        return sorted(rank for part, rank in first.items() if part != self.parts[self.owner])


class SharedMatrices:
    """
    Matrices with slices or copies on a group's ranks.

    A parameter's last two dimensions are rows and columns; other dimensions stack matrices, such as experts. If every
    rank has whole matrices from a stack, they are not moved, and ranks with copies split them. Any other parameter is
    orthogonalised on one rank, chosen to balance the work. Matrices are exchanged in bfloat16, like the
    orthogonalisation.
    """

    def __init__(self, slices: Mapping[str, TensorSlice], ranks: Group) -> None:
        """Plan how this rank exchanges slices with the other ranks. A collective."""
        self._slices = slices
        self._ranks = ranks
        fields = [[name, own.shape, own.offsets, own.size] for name, own in slices.items()]
        slices_by_rank = [
            {name: TensorSlice(tuple(shape), tuple(offsets), tuple(size)) for name, shape, offsets, size in rank_fields}
            for rank_fields in ranks.gather_json(fields)
        ]
        self._shares = list(_plan_matrix_shares(slices_by_rank))
        self._owned_shares = [share for share in self._shares if share.owner == ranks.rank]
        self._exchanges = any(
            part is not None for share in self._shares for rank, part in enumerate(share.parts) if rank != share.owner
        )

    def orthogonalize_slices(self, updates: Mapping[str, Tensor], ns_steps: int) -> dict[str, Tensor]:
        """Return the orthogonalised matrices' slices by name, given the slices; bfloat16. A collective."""
        outputs = {name: torch.empty_like(update, dtype=torch.bfloat16) for name, update in updates.items()}
        received = self._exchange_parts_with_owners(updates)
        # Pieces are in the order of the shares, in which their receivers split them.
        pieces_by_rank: list[list[Tensor]] = [[] for _ in range(self._ranks.size)]
        for share_index, share in enumerate(self._owned_shares):
            parts = {rank: received[share_index, rank] for rank in share.sender_ranks}
            result = orthogonalize(self._assemble_matrices(share, updates[share.name], parts), ns_steps)
            for rank, part in enumerate(share.parts):
                if part is not None and rank == self._ranks.rank:
                    outputs[share.name][part.index(self._slices[share.name])] = result[part.index(share.region)]
                elif part is not None:
                    pieces_by_rank[rank].append(result[part.index(share.region)].reshape(-1))
        self._exchange_results_into_outputs(pieces_by_rank, outputs)
        return outputs

    def _exchange_parts_with_owners(self, updates: Mapping[str, Tensor]) -> dict[tuple[int, int], Tensor]:
        """Send missing parts to the owners, and return received parts by owned share and sender."""
        if not self._exchanges:
            return {}
        this_rank = self._ranks.rank
        sent: list[list[Tensor]] = [[] for _ in range(self._ranks.size)]
        for share in self._shares:
            part = share.parts[this_rank]
            if part is not None and this_rank in share.sender_ranks:
                piece = updates[share.name][part.index(self._slices[share.name])]
                sent[share.owner].append(piece.bfloat16().reshape(-1))
        expected = [
            [
                (number, rank, part)
                for number, share in enumerate(self._owned_shares)
                if rank in share.sender_ranks and (part := share.parts[rank])
            ]
            for rank in range(self._ranks.size)
        ]
        sizes = [[part.numel for _, _, part in rank_parts] for rank_parts in expected]
        pieces = iter(self._all_to_all(sent, sizes, updates))
        return {
            (number, rank): next(pieces).view(part.size) for rank_parts in expected for number, rank, part in rank_parts
        }

    def _assemble_matrices(self, share: _Share, update: Tensor, received: Mapping[int, Tensor]) -> Tensor:
        """Return a share's matrices, given this rank's parameter slice and the received parts by rank."""
        own, own_slice = share.parts[share.owner], self._slices[share.name]
        if own == share.region:
            return update[own.index(own_slice)].bfloat16()
        whole = torch.empty(share.region.size, dtype=torch.bfloat16, device=update.device)
        if own is not None:
            whole[own.index(share.region)] = update[own.index(own_slice)].bfloat16()
        for rank, piece in received.items():
            part = share.parts[rank]
            assert part is not None
            whole[part.index(share.region)] = piece
        return whole

    def _exchange_results_into_outputs(self, results: Sequence[Sequence[Tensor]], outputs: dict[str, Tensor]) -> None:
        """Send results to the ranks with slices of them, and copy received results to `outputs`."""
        if not self._exchanges:
            return
        this_rank = self._ranks.rank
        parts = [
            [
                (share.name, part)
                for share in self._shares
                if share.owner == rank != this_rank and (part := share.parts[this_rank])
            ]
            for rank in range(self._ranks.size)
        ]
        sizes = [[part.numel for _, part in rank_parts] for rank_parts in parts]
        pieces = iter(self._all_to_all(results, sizes, outputs))
        for name, part in (pair for rank_parts in parts for pair in rank_parts):
            outputs[name][part.index(self._slices[name])] = next(pieces).view(part.size)

    def _all_to_all(
        self, sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[int]], like: Mapping[str, Tensor]
    ) -> Sequence[Tensor]:
        """
        Send flat bfloat16 pieces (elements,) by rank, and return the received pieces in rank order.

        `received` are their sizes by sender. `like` has any tensors on the device for the received pieces.
        """
        device = next(iter(like.values())).device
        empty = torch.empty(0, dtype=torch.bfloat16, device=device)
        flat = torch.cat([empty, *(piece for pieces in sent for piece in pieces)])
        counts = [sum(piece.numel() for piece in pieces) for pieces in sent]
        rows = self._ranks.all_to_all(flat, counts, [sum(sizes) for sizes in received])
        return torch.split(rows, [size for sizes in received for size in sizes])


def _plan_matrix_shares(slices_by_rank: Sequence[Mapping[str, TensorSlice]]) -> Iterator[_Share]:
    """Yield all matrices' shares, the same on every rank. All ranks have slices with the same names."""
    work = [0] * len(slices_by_rank)
    first_rank = slices_by_rank[0]
    for name in sorted(first_rank, key=lambda name: (-_estimate_multiplications(first_rank[name].shape), name)):
        slices = [rank_slices[name] for rank_slices in slices_by_rank]
        if len(slices[0].shape) > 2 and all(part.size[-2:] == part.shape[-2:] for part in slices):  # whole matrices
            regions = list(_assign_regions_to_owners(slices))
        else:
            regions = [(TensorSlice.whole(slices[0].shape), min(range(len(work)), key=work.__getitem__))]
        for region, owner in regions:
            work[owner] += _estimate_multiplications(region.size)
            yield _Share(name, region, owner, [region.overlap(part) for part in slices])


def _estimate_multiplications(shape: Sequence[int]) -> int:
    """Return roughly an iteration's number of multiplications."""
    return prod(shape) * min(shape[-2:])


def _assign_regions_to_owners(slices: Sequence[TensorSlice]) -> Iterator[tuple[TensorSlice, int]]:
    """
    Yield (region, owning rank): every slice is divided along its first dimension among the ranks that hold a copy.
    """
    ranks_by_slice: dict[TensorSlice, list[int]] = {}
    for rank, part in enumerate(slices):
        if part.numel:
            ranks_by_slice.setdefault(part, []).append(rank)
    for part, ranks in ranks_by_slice.items():
        sizes = [part.size[0] // len(ranks) + (number < part.size[0] % len(ranks)) for number in range(len(ranks))]
        for (begin, end), rank in zip(pairwise(accumulate(sizes, initial=0)), ranks, strict=True):
            if end > begin:
                offsets = (part.offsets[0] + begin, *part.offsets[1:])
                yield TensorSlice(part.shape, offsets, (end - begin, *part.size[1:])), rank


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
    lr: float = setting("base learning rate for Muon and AdamW", check=above(0))
    targets: list[str] = setting(
        "name patterns (fnmatch) for Muon's matrices",
        factory=lambda: ["*layers.*"],
        check=find_targets_fault,
        impact="incompatible",
    )
    adjust_lr_fn: Adjustment = setting(
        "learning-rate multiplier by matrix shape: match_rms_adamw is 0.2 * sqrt(max(rows, columns)), for "
        "updates as large as AdamW's; original is sqrt(max(1, rows / columns))",
        default="match_rms_adamw",
    )
    momentum: float = setting("decay rate for Muon's running mean of gradients", default=0.95, check=between(0, 1))
    nesterov: bool = setting("mix the gradient into its running mean once more (Nesterov momentum)", default=True)
    ns_steps: int = setting("Newton-Schulz iterations", default=5, check=between(1, 1001))
    betas: tuple[float, float] = setting(
        "decay rates for AdamW's two running means", default=(0.9, 0.95), check=find_betas_fault
    )
    eps: float = setting("constant added to AdamW's denominator", default=1e-8, check=above(0))
    maximize: bool = setting("maximize the objective instead of minimizing it", default=False)
    weight_decay: float = setting("decoupled weight decay coefficient", default=0.1, check=at_least(0))
    groups: list[AdamGroup] = setting("parameter groups with their own options; the first match wins", factory=list)

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
        groups = self._create_torch_param_groups(self.eps)
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
            create_fastest_adamw(adamw_groups, betas=self.betas, eps=self.eps, maximize=self.maximize),
        ]

    def _step_in_pieces(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, MuonStep):
            self._streamed[optimizer].step(optimizer.update_momentum)
            optimizer.step()  # ranks exchange all matrices at once
        else:
            super()._step_in_pieces(optimizer)

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
    def update_momentum(self) -> None:
        """Update the running means of the parameters in `param_groups`, and keep their updates for `step`."""
        for group in self.param_groups:
            for part in group["params"]:
                # Add the gradient to the momentum, and return the (Nesterov) momentum to orthogonalise
                state, gradient = self.state[part], get_or_create_gradient(part).to(part.dtype)
                gradient = -gradient if group["maximize"] else gradient
                mean: Tensor = state.setdefault("momentum_buffer", torch.zeros_like(part))
                averaged = torch.lerp(mean, gradient, 1 - group["momentum"])
                self._copy_unless_inf_found(mean, averaged)
                self._updates[self._names[part]] = (
                    gradient.lerp(averaged, group["momentum"]) if group["nesterov"] else averaged
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights, and all running means unless `update_momentum` has done it."""
        if not self._updates:
            self.update_momentum()
        updates, self._updates = self._updates, {}
        directions = self._shared.orthogonalize_slices(updates, self.defaults["ns_steps"]) if updates else {}
        for group in self.param_groups:
            for part in group["params"]:
                name = self._names[part]
                shape = self._slices[name].shape
                rate = group["lr"] * _compute_lr_multiplier(self._adjust, shape, group["width"])
                updated = part * (1 - group["lr"] * group["weight_decay"])
                self._copy_unless_inf_found(part, updated.add_(directions[name], alpha=-rate))

    def _copy_unless_inf_found(self, tensor: Tensor, value: Tensor) -> None:
        tensor.copy_(value if self.found_inf is None else torch.where(self.found_inf > 0, tensor, value))


def _compute_lr_multiplier(adjustment: Adjustment, shape: tuple[int, ...], width_ratio: float) -> float:
    """Return the learning-rate multiplier for whole matrices, `width_ratio` times as wide as the base's."""
    rows, columns = shape[-2:]
    if adjustment == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns) / width_ratio)
