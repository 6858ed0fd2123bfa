"""Experts of two GPUs, which read tokens from each other's memory."""

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
    """What a rank gets back, and the gradients of its tokens and probabilities; tokens differ from round to round."""
    generator = torch.Generator("cuda").manual_seed(2 * number + rank)
    common: Any = {"generator": generator, "device": "cuda"}
    tokens = TOKENS - 100 * rank - number
    hidden = torch.randn(tokens, WIDTH, **common).bfloat16().requires_grad_()
    probabilities, chosen = torch.rand(tokens, EXPERTS, **common).topk(CHOICES)
    probabilities.requires_grad_()
    here = dispatcher.dispatch(hidden, chosen, probabilities, EXPERTS)
    used = int(here.ends[-1])
    scaled = (here.rows[:used] * here.scale[:used, None]).to(here.rows.dtype)
    rows = torch.cat([scaled, here.rows.new_zeros(len(here.rows) - used, WIDTH)])
    given = here.combine(rows)
    grads = torch.autograd.grad(given.float().square().sum(), (hidden, probabilities))
    return [given.detach(), *grads]


def _rounds() -> list[list[float]]:
    """By round, the relative differences of each dispatcher's results from those of all-to-all collectives."""
    with join_processes("cuda", timeout=60.0) as (processes, device):
        mesh = RankMesh(processes=processes, data_shard=2, expert=2)
        mesh.open()
        common: Any = {"kernels": kernels_on(device.device), "mesh": mesh}
        known = AllToAllExperts(**common)
        tried = [SymmetricExperts(**common), SymmetricExperts(**common, max_tokens=TOKENS, capacity=1.9)]
        found = []
        for number in range(ROUNDS):
            wanted = _round(known, number, processes.rank)
            for dispatcher in tried:
                ours = _round(dispatcher, number, processes.rank)
                pairs = zip(ours, wanted, strict=True)
                found.append([float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs])
        return found


def test_tokens_are_exchanged_as_by_collectives_round_after_round() -> None:
    """With ever other tokens, results and gradients are those of all-to-all: no rank reads what is not written yet."""
    for found in run_ranks(_rounds, 2, timeout=180):
        assert all(difference < 0.01 for differences in found for difference in differences), max(map(max, found))
