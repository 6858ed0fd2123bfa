"""
Orthogonalisation of shared matrices: one rank gathers a matrix's slices and scatters the result.

Jordan et al. 2024, "Muon", https://kellerjordan.github.io/posts/muon; Liu et al. 2025, "Muon is Scalable for LLM
Training", arXiv 2502.16982, section 2.3, algorithm 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.distributed import Group
from drawloom.components.ports.slices import TensorSlice

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
        self._exchanges = any(share.parts.count(None) < ranks.size - 1 for share in self._shares)

    def orthogonalize(self, updates: Mapping[str, Tensor], ns_steps: int) -> dict[str, Tensor]:
        """Return the orthogonalised matrices' slices by name, given the slices; bfloat16. A collective."""
        outputs = {name: torch.empty_like(update, dtype=torch.bfloat16) for name, update in updates.items()}
        received = self._exchange_parts_with_owners(updates)
        results: list[list[Tensor]] = [[] for _ in range(self._ranks.size)]
        for number, share in enumerate(self._owned_shares):
            parts = {rank: received[number, rank] for rank in share.sender_ranks}
            result = orthogonalize(self._assemble_matrices(share, updates[share.name], parts), ns_steps)
            for rank, part in enumerate(share.parts):
                if part is not None and rank == self._ranks.rank:
                    outputs[share.name][part.index(self._slices[share.name])] = result[part.index(share.region)]
                elif part is not None:
                    results[rank].append(result[part.index(share.region)].reshape(-1))
        self._exchange_results_into_outputs(results, outputs)
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
        if _are_stacks_of_whole_matrices(slices):
            regions = list(_assign_regions_to_owners(slices))
        else:
            regions = [(TensorSlice.whole(slices[0].shape), min(range(len(work)), key=work.__getitem__))]
        for region, owner in regions:
            work[owner] += _estimate_multiplications(region.size)
            yield _Share(name, region, owner, [region.overlap(part) for part in slices])


def _estimate_multiplications(shape: Sequence[int]) -> int:
    """Return roughly an iteration's number of multiplications."""
    return prod(shape) * min(shape[-2:])


def _are_stacks_of_whole_matrices(slices: Sequence[TensorSlice]) -> bool:
    return len(slices[0].shape) > 2 and all(part.size[-2:] == part.shape[-2:] for part in slices)


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
