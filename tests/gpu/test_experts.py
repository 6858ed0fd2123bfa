"""Experts on two GPUs that read tokens from each other's memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.experts.all_to_all import AllToAllExperts
from drawloom.components.experts.symmetric import SymmetricExperts
from drawloom.components.ports.experts import Dispatcher
from support.joined import join_processes
from support.processes import run_ranks
from support.qwen3 import kernels_on

TOKENS, CHOICES, WIDTH, EXPERTS, ROUNDS = 700, 4, 512, 16, 60

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("meshes")]


def _round(dispatcher: Dispatcher, number: int, rank: int) -> list[Tensor]:
    """Return a rank's combined tokens, and the gradients of tokens and probabilities, for a round's random tokens."""
    generator = torch.Generator("cuda").manual_seed(2 * number + rank)
    common: Any = {"generator": generator, "device": "cuda"}
    tokens = TOKENS - 100 * rank - number
    hidden = torch.randn(tokens, WIDTH, **common).bfloat16().requires_grad_()
    probabilities, chosen = torch.rand(tokens, EXPERTS, **common).topk(CHOICES)
    probabilities.requires_grad_()
    dispatched = dispatcher.dispatch(hidden, chosen, probabilities, EXPERTS)
    used = int(dispatched.ends[-1])
    scaled = (dispatched.rows[:used] * dispatched.scale[:used, None]).to(dispatched.rows.dtype)
    rows = torch.cat([scaled, dispatched.rows.new_zeros(len(dispatched.rows) - used, WIDTH)])
    combined = dispatched.combine(rows)
    grads = torch.autograd.grad(combined.float().square().sum(), (hidden, probabilities))
    return [combined.detach(), *grads]


def _rounds() -> list[list[float]]:
    """Return every round's relative differences between symmetric dispatchers and all-to-all collectives."""
    with join_processes("cuda", timeout=60.0) as (processes, device):
        mesh = RankMesh(processes=processes, data_shard=2, expert=2)
        mesh.open()
        common: Any = {"kernels": kernels_on(device.device), "mesh": mesh}
        known = AllToAllExperts(**common)
        rooms = None, 1.9, 1.0  # the last has less room than rows, and grows
        tried = [SymmetricExperts(**common, max_tokens=TOKENS, capacity=room) for room in rooms]
        differences = []
        for number in range(ROUNDS):
            wanted = _round(known, number, processes.rank)
            for dispatcher in tried:
                ours = _round(dispatcher, number, processes.rank)
                while dispatcher.grow_if_rows_were_dropped():
                    ours = _round(dispatcher, number, processes.rank)
                pairs = zip(ours, wanted, strict=True)
                differences.append([float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs])
        return differences


def test_symmetric_exchange_matches_collectives_in_every_round() -> None:
    """Results and gradients match all-to-all for changing tokens: no rank reads before the data is written."""
    for rounds in run_ranks(_rounds, 2, timeout=180):
        assert all(difference < 0.01 for differences in rounds for difference in differences), max(map(max, rounds))
