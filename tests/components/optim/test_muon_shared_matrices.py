"""Orthogonalization of matrices whose slices are on several ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.optim import muon
from drawloom.components.optim.muon import SharedMatrices, orthogonalize
from drawloom.components.ports.slices import TensorSlice
from support.processes import run_ranks

RANKS = 4
Places = Callable[[int], tuple[tuple[int, ...], tuple[int, ...]]]
"""The offsets and the size of a rank's slice."""

LAYOUTS: dict[str, tuple[tuple[int, ...], Places]] = {
    "rows, of which the last rank has none": ((5, 7), lambda rank: ((min(2 * rank, 5), 0), ((2, 2, 1, 0)[rank], 7))),
    "columns": ((6, 8), lambda rank: ((0, 2 * rank), (6, 2))),
    "blocks": ((6, 8), lambda rank: ((3 * (rank % 2), 4 * (rank // 2)), (3, 4))),
    "halves, each on two ranks": ((8, 5), lambda rank: ((4 * (rank % 2), 0), (4, 5))),
    "whole": ((9, 4), lambda rank: ((0, 0), (9, 4))),
    "a square": ((6, 6), lambda rank: ((0, 0), (6, 6))),
    "experts": ((8, 6, 5), lambda rank: ((2 * rank, 0, 0), (2, 6, 5))),
    "experts, some ranks with none": ((2, 6, 5), lambda rank: ((min(rank, 2), 0, 0), (int(rank < 2), 6, 5))),
    "experts on two ranks": ((6, 4, 5), lambda rank: ((3 * (rank // 2), 0, 0), (3, 4, 5))),
    "columns of experts": ((3, 4, 8), lambda rank: ((0, 0, 2 * rank), (3, 4, 2))),
}
ROWS: dict[str, tuple[tuple[int, ...], Places]] = {
    name: ((1, 4), lambda rank: ((min(rank, 1), 0), (int(rank == 0), 4))) for name in ("a row", "another row")
}
"""Matrices that the first rank has whole, without a copy, though another rank may compute them."""


def matrices() -> dict[str, Tensor]:
    """Return the whole matrices, float64."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).double() for name, (shape, _) in (LAYOUTS | ROWS).items()}


def _orthogonalize_shared() -> tuple[dict[str, Tensor], list[int]]:
    """Return this rank's slices of the results, and its number of orthogonalized elements."""
    elements: list[int] = []

    def count_and_orthogonalize(matrices: Tensor, ns_steps: int) -> Tensor:
        elements.append(matrices.numel())
        return orthogonalize(matrices, ns_steps)

    muon.orthogonalize = count_and_orthogonalize
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=30.0)
    processes.open()
    try:
        group = processes.make_group("all", [list(range(RANKS))])
        outputs: dict[str, Tensor] = {}
        for layouts in (LAYOUTS, ROWS):
            places = {
                name: TensorSlice(shape, *slice_of_rank(group.rank)) for name, (shape, slice_of_rank) in layouts.items()
            }
            updates = {name: matrices()[name][places[name].index()] for name in layouts}
            outputs |= SharedMatrices(places, group).orthogonalize_slices(updates, 5)
        return outputs, elements
    finally:
        processes.close()


def test_slices_equal_whole_matrices_computed_once() -> None:
    """With any slices, results are bitwise equal to one process's; ranks divide the work, without repetition."""
    ranks: list[Any] = run_ranks(_orthogonalize_shared, RANKS)
    wholes = matrices()
    for name, (shape, slice_of_rank) in (LAYOUTS | ROWS).items():
        expected = orthogonalize(wholes[name], 5)
        for rank, (slices, _) in enumerate(ranks):
            assert torch.equal(slices[name], expected[TensorSlice(shape, *slice_of_rank(rank)).index()]), (name, rank)
    assert sum(sum(elements) for _, elements in ranks) == sum(whole.numel() for whole in wholes.values())
    assert all(elements for _, elements in ranks)


def test_results_are_nearly_orthogonal() -> None:
    """The result has the matrix's singular vectors, and singular values between 0.5 and 1.5, tall or wide."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((40, 12), (12, 40), (3, 20, 20)):
        result = orthogonalize(torch.randn(shape, generator=generator), 5).float()
        values = torch.linalg.svdvals(result)
        assert values.min() > 0.3 and values.max() < 1.5, shape
