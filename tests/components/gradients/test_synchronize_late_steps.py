"""Runs whose host learns norms and skips a step later, beside runs whose host knows them at once."""

from typing import Any

import pytest
import torch

from drawloom.components.distributed.device import ComputeDevice
from support.equality import assert_equal
from support.host_reads import NoHostReads
from support.late_steps import OPTIMIZERS, Small

CPU = ComputeDevice(kind="cpu")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_late_steps_equal_those_of_a_waiting_host(optimizer: str, one_rank: Any) -> None:
    """
    Skipped steps, losses, weights and optimizer state are the same; from a backward pass to its update the host reads
    nothing. The norm is the exact sum's up to rounding, and rounding to float32 hides this in the clipping factor.
    """
    late, known = (Small(one_rank, CPU, optimizer, norm, {1, 3, 4}) for norm in ("device", "exact"))
    late.watch = NoHostReads
    late.train(6)
    known.train(6)
    assert late.reasons == known.reasons
    assert [bool(reason) for reason in late.reasons] == [True, False, True, True, False, False]
    assert late.norms == pytest.approx(known.norms, rel=1e-12)
    assert late.losses == known.losses
    weights = known.weights()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in late.weights().items())
    assert_equal(late.updater.state_dict(), known.updater.state_dict())


@pytest.mark.parametrize(("bad", "last"), [({2, 3, 4}, 4), ({2, 5, 6}, 6)])
def test_a_run_of_late_steps_ends_as_one_that_waits(bad: set[int], last: int, one_rank: Any) -> None:
    """Too many skipped steps in a row, or at the end, raise the same error with the same earlier weights."""
    late, known = (Small(one_rank, CPU, "adamw", norm, bad).train(6, 3) for norm in ("device", "exact"))
    assert late.error == known.error and f"at last step {last}" in late.error
    assert late.reasons == known.reasons
    weights = known.weights()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in late.weights().items())
