"""Experts partitioned over several ranks, which read tokens from each other's memory."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.experts.symmetric import SymmetricExperts
from drawloom.components.ports.distributed import Mesh
from drawloom.graph import UserError
from drawloom.testing import fake
from support.dispatchers import (
    CHOICES,
    EXPERTS,
    RANKS,
    WIDTH,
    Results,
    assert_equal_to_one_rank,
    experts_of,
    inputs,
    run_on_ranks,
)
from support.processes import run_ranks
from support.qwen3 import cpu_kernels

MOST = 14


@pytest.fixture(scope="module")
def without_capacity() -> Results:
    """Run dispatch on three ranks, which wait for row counts."""
    return run_on_ranks(partial(SymmetricExperts, max_tokens=MOST))


@pytest.fixture(scope="module")
def with_capacity() -> Results:
    """Run dispatch on three ranks with room for all possible rows."""
    return run_on_ranks(partial(SymmetricExperts, max_tokens=MOST, capacity=3.0))


@pytest.mark.parametrize("name", CHOICES)
def test_results_and_gradients_equal_one_rank(name: str, without_capacity: Results) -> None:
    """Hidden states, probabilities and every weight, of experts without tokens too, have one rank's gradients."""
    assert_equal_to_one_rank(name, without_capacity[name])


@pytest.mark.parametrize("name", CHOICES)
def test_room_for_more_rows_changes_nothing(name: str, with_capacity: Results, without_capacity: Results) -> None:
    """With unused rows behind the last, results and gradients are the same to the bit."""
    for ours, theirs in zip(with_capacity[name], without_capacity[name], strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def _evaluations() -> list[list[Tensor]]:
    """Return this rank's outputs without gradients for the entries of CHOICES, in both orders."""
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=30.0)
    processes.open()
    try:
        mesh = RankMesh(processes=processes, data_shard=RANKS, expert=RANKS)
        mesh.open()
        evaluations = []
        for names, settings in ((CHOICES, {}), (reversed(CHOICES), {"capacity": 1.0, "max_tokens": 1})):
            dispatcher = SymmetricExperts(kernels=cpu_kernels(), mesh=mesh, **settings)  # type: ignore[arg-type]
            results = {}
            for name in names:
                with torch.inference_mode():
                    here = dispatcher.dispatch(*inputs(CHOICES[name], mesh.world.rank), EXPERTS)
                    results[name] = here.combine(here.rows * here.scale[:, None])
            evaluations.append([results[name].clone() for name in CHOICES])
        return evaluations
    finally:
        processes.close()


def test_an_evaluation_does_not_depend_on_earlier_microbatches() -> None:
    """
    After any microbatches, and with any capacity in training, all tokens and rows fit, and results have the same bits:
    a process resumed after the last step begins with a sample.
    """
    for rank, (ours, theirs) in enumerate(run_ranks(_evaluations, RANKS)):
        for name, one, other in zip(CHOICES, ours, theirs, strict=True):
            hidden, chosen, probabilities = inputs(CHOICES[name], rank)
            expected = hidden * probabilities.where(chosen >= 0, 0).sum(1, keepdim=True)
            torch.testing.assert_close(one, expected.detach(), rtol=1e-13, atol=1e-14)
            assert torch.equal(one, other)


def _crowd_first_rank() -> list[Any]:
    """
    Return this rank's results with room for balanced experts, after it has grown, and with room for all rows; and
    the message for too many tokens.
    """
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=30.0)
    processes.open()
    try:
        mesh = RankMesh(processes=processes, data_shard=2, expert=2)
        mesh.open()
        # All tokens choose the first rank's expert.
        hidden, _, probabilities = inputs([[[0, 0]] * 4] * 2, mesh.world.rank)
        chosen = torch.tensor([[0, 0]] * 4)

        def run(dispatcher: SymmetricExperts) -> list[Tensor]:
            there = dispatcher.dispatch(hidden, chosen, probabilities, 2)
            combined = there.combine(there.rows * there.scale[:, None])
            return [combined.detach(), *torch.autograd.grad(combined.sum(), (hidden, probabilities))]

        narrow, wide = (SymmetricExperts(kernels=cpu_kernels(), mesh=mesh, capacity=room) for room in (1.0, None))
        crowded, has_grown = run(narrow), narrow.grow_if_rows_were_dropped()
        again, grows_again = run(narrow), narrow.grow_if_rows_were_dropped()
        results = [crowded, has_grown, again, grows_again, run(wide), wide.grow_if_rows_were_dropped()]
        try:
            SymmetricExperts(kernels=cpu_kernels(), mesh=mesh, max_tokens=3).dispatch(hidden, chosen, probabilities, 2)
        except UserError as error:
            results.append(str(error))
        return results
    finally:
        processes.close()


def test_dropped_rows_make_gradients_nan_and_make_more_room() -> None:
    """
    Gradients are NaN on the rank that has dropped the other rank's rows, and values are finite. Then both repeat the
    pass, with the bits of one with room for all rows. Tokens beyond the memory are refused at once.
    """
    for rank, (crowded, has_grown, again, grows_again, expected, wide_grows, refusal) in enumerate(
        run_ranks(_crowd_first_rank, 2)
    ):
        assert has_grown and not grows_again and not wide_grows
        assert crowded[0].isfinite().all() and torch.equal(crowded[0], expected[0]) == (rank == 0)
        assert bool(crowded[2].isnan().any()) == (rank == 0)
        assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))
        assert "has 4 tokens, and memory for 3 tokens; set max_tokens = 4 or more" in refusal


def test_shapes_are_known_without_an_exchange() -> None:
    """On the meta device, where stages learn their message sizes, no rank waits for another."""
    mesh: Any = fake(Mesh, expert_group=type("Group", (), {"size": 2})())
    module = experts_of()
    module.dispatcher = SymmetricExperts(kernels=cpu_kernels(), mesh=mesh)
    hidden, chosen = torch.empty(5, WIDTH, device="meta"), torch.empty(5, 2, dtype=torch.int64, device="meta")
    assert module(hidden.double(), chosen, hidden[:, :2].double()).shape == (5, WIDTH)
