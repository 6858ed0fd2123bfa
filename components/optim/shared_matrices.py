"""
Orthogonalisation of matrices of which ranks have slices: each matrix is brought to one rank, and its result back.

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
    Matrices with about the same singular vectors and singular values near 1: (..., rows, columns), in bfloat16.

    A Newton-Schulz iteration of the fifth order, as `torch.optim.Muon` has it for one matrix.
    """
    if not matrices.numel():
        return matrices.bfloat16()
    a, b, c = COEFFICIENTS
    flat: Tensor = matrices.bfloat16() if matrices.ndim == 2 else matrices.bfloat16().flatten(0, -3)
    add_product = torch.addmm if flat.ndim == 2 else torch.baddbmm
    wide = flat.mT if flat.shape[-2] > flat.shape[-1] else flat
    # So that no singular value is above 1.
    found: Tensor = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(ns_steps):
        gram = found @ found.mT
        found = add_product(found, add_product(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return (found if wide is flat else found.mT).reshape(matrices.shape)


def orthogonalize_flops(shape: Sequence[int], ns_steps: int) -> float:
    """Floating-point operations of `orthogonalize` for matrices of a shape."""
    *stack, small, large = *shape[:-2], *sorted(shape[-2:])
    return ns_steps * prod(stack) * (4.0 * small**2 * large + 2.0 * small**3)


@attrs.frozen(eq=False)
class _Share:
    """
    Matrices that one rank orthogonalises: the box `region` of a parameter, of which ranks have `parts`, by rank.

    `senders` have a part that the owner has not, each a different one.
    """

    name: str
    region: TensorSlice
    owner: int
    parts: Sequence[TensorSlice | None]

    @property
    def senders(self) -> list[int]:
        """The first rank of those that have the same part, for each part that the owner lacks."""
        first: dict[TensorSlice, int] = {}
        for rank, part in enumerate(self.parts):
            if part is not None:
                first.setdefault(part, rank)
        return sorted(rank for part, rank in first.items() if part != self.parts[self.owner])


class SharedMatrices:
    """
    Parameters of matrices, of which the ranks of a group have slices, or the same ones.

    The last two dimensions are those of a matrix, others number a stack of them, such as experts. A stack of which
    ranks have whole matrices stays where it is, shared out between those that have the same ones. Any other is
    orthogonalised on one rank, so that each has about the same work. Matrices travel in bfloat16, in which they are
    orthogonalised anyway.
    """

    def __init__(self, places: Mapping[str, TensorSlice], ranks: Group) -> None:
        """Plan the exchange; `places` are the slices of this rank. A collective."""
        self._places = places
        self._ranks = ranks
        fields = [[name, place.shape, place.offsets, place.size] for name, place in places.items()]
        everywhere = [
            {name: TensorSlice(tuple(shape), tuple(offsets), tuple(size)) for name, shape, offsets, size in each}
            for each in ranks.gather_json(fields)
        ]
        self._shares = list(_shares_of(everywhere))
        self._mine = [share for share in self._shares if share.owner == ranks.rank]
        self._exchanges = any(share.parts.count(None) < ranks.size - 1 for share in self._shares)

    def orthogonalize(self, updates: Mapping[str, Tensor], ns_steps: int) -> dict[str, Tensor]:
        """The slices of the results of slices, by name, in bfloat16 (their shapes); a collective."""
        found = {name: torch.empty_like(update, dtype=torch.bfloat16) for name, update in updates.items()}
        received = self._exchange(updates)
        results: list[list[Tensor]] = [[] for _ in range(self._ranks.size)]
        for number, share in enumerate(self._mine):
            parts = {rank: received[number, rank] for rank in share.senders}
            result = orthogonalize(self._assembled(share, updates[share.name], parts), ns_steps)
            for rank, part in enumerate(share.parts):
                if part is not None and rank == self._ranks.rank:
                    found[share.name][part.index(self._places[share.name])] = result[part.index(share.region)]
                elif part is not None:
                    results[rank].append(result[part.index(share.region)].reshape(-1))
        self._give_back(results, found)
        return found

    def _exchange(self, updates: Mapping[str, Tensor]) -> dict[tuple[int, int], Tensor]:
        """What the owners of matrices lack: the parts that came here, by their share's number and the sender."""
        if not self._exchanges:
            return {}
        mine = self._ranks.rank
        sent: list[list[Tensor]] = [[] for _ in range(self._ranks.size)]
        for share in self._shares:
            part = share.parts[mine]
            if part is not None and mine in share.senders:
                piece = updates[share.name][part.index(self._places[share.name])]
                sent[share.owner].append(piece.bfloat16().reshape(-1))
        expected = [
            [(number, rank, share.parts[rank]) for number, share in enumerate(self._mine) if rank in share.senders]
            for rank in range(self._ranks.size)
        ]
        sizes = [[part.numel for _, _, part in each if part] for each in expected]
        pieces = iter(self._all_to_all(sent, sizes, updates))
        return {
            (number, rank): next(pieces).view(part.size) for each in expected for number, rank, part in each if part
        }

    def _assembled(self, share: _Share, update: Tensor, received: Mapping[int, Tensor]) -> Tensor:
        """All of a share's matrices, of this rank's slice of the parameter and what came from other ranks."""
        own, place = share.parts[share.owner], self._places[share.name]
        if own == share.region:
            return update[own.index(place)].bfloat16()
        whole = torch.empty(share.region.size, dtype=torch.bfloat16, device=update.device)
        if own is not None:
            whole[own.index(share.region)] = update[own.index(place)].bfloat16()
        for rank, piece in received.items():
            part = share.parts[rank]
            assert part is not None
            whole[part.index(share.region)] = piece
        return whole

    def _give_back(self, results: Sequence[Sequence[Tensor]], found: dict[str, Tensor]) -> None:
        """Bring results to the ranks that have slices of them, into `found`."""
        if not self._exchanges:
            return
        mine = self._ranks.rank
        parts = [
            [
                (share.name, part)
                for share in self._shares
                if share.owner == rank != mine and (part := share.parts[mine])
            ]
            for rank in range(self._ranks.size)
        ]
        pieces = iter(self._all_to_all(results, [[part.numel for _, part in each] for each in parts], found))
        for name, part in (pair for each in parts for pair in each):
            found[name][part.index(self._places[name])] = next(pieces).view(part.size)

    def _all_to_all(
        self, sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[int]], like: Mapping[str, Tensor]
    ) -> Sequence[Tensor]:
        """Flat pieces (elements,) for each rank; gives those that came, of these sizes, by rank."""
        device = next(iter(like.values())).device
        flat = torch.cat([torch.empty(0, dtype=torch.bfloat16, device=device), *(each for own in sent for each in own)])
        counts = [sum(each.numel() for each in own) for own in sent]
        rows = self._ranks.all_to_all(flat, counts, [sum(sizes) for sizes in received])
        return torch.split(rows, [size for sizes in received for size in sizes])


def _shares_of(everywhere: Sequence[Mapping[str, TensorSlice]]) -> Iterator[_Share]:
    """The shares of all matrices; the same on every rank. `everywhere` is what ranks have, each of the same names."""
    work = [0] * len(everywhere)
    for name in sorted(everywhere[0], key=lambda name: (-_cost(everywhere[0][name].shape), name)):
        places = [each[name] for each in everywhere]
        if _is_stack_of_whole_matrices(places):
            regions = list(_divided_among_holders(places))
        else:
            regions = [(TensorSlice.whole(places[0].shape), min(range(len(work)), key=work.__getitem__))]
        for region, owner in regions:
            work[owner] += _cost(region.size)
            yield _Share(name, region, owner, [region.overlap(place) for place in places])


def _cost(shape: Sequence[int]) -> int:
    """About the multiplications of an iteration."""
    return prod(shape) * min(shape[-2:])


def _is_stack_of_whole_matrices(places: Sequence[TensorSlice]) -> bool:
    return len(places[0].shape) > 2 and all(place.size[-2:] == place.shape[-2:] for place in places)


def _divided_among_holders(places: Sequence[TensorSlice]) -> Iterator[tuple[TensorSlice, int]]:
    """Each different slice, cut along the first dimension for the ranks that have it."""
    holders: dict[TensorSlice, list[int]] = {}
    for rank, place in enumerate(places):
        if place.numel:
            holders.setdefault(place, []).append(rank)
    for place, ranks in holders.items():
        sizes = [place.size[0] // len(ranks) + (number < place.size[0] % len(ranks)) for number in range(len(ranks))]
        for (begin, end), rank in zip(pairwise(accumulate(sizes, initial=0)), ranks, strict=True):
            if end > begin:
                offsets = (place.offsets[0] + begin, *place.offsets[1:])
                yield TensorSlice(place.shape, offsets, (end - begin, *place.size[1:])), rank
