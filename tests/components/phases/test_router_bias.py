"""The biases of routers follow the tokens of experts."""

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from drawloom.components.adapters.full_tuning import FullTuning
from drawloom.components.model.decoder.branch_specs import ExpertSpec
from drawloom.components.model.decoder.experts import Router
from drawloom.components.phases.router_bias import RouterBias
from drawloom.components.ports.run import Step
from drawloom.graph import UserError
from support.doubles import FixedStages, Machine
from support.qwen3 import cpu_kernels
from support.steps import LateState, make_skipped_step


@attrs.frozen
class Other:
    """A group with one other rank, whose tokens had these counts."""

    tokens: Tensor
    rank: int = 0
    size: int = 2

    def sum(self, tensor: Tensor) -> None:
        tensor += self.tokens


def routers(*biased: bool) -> list[Router]:
    """Return routers with 4 experts: a token's expert is its greatest channel."""
    kernels = cpu_kernels()
    options: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 1, "width": 1, "scoring_func": "sigmoid"}
    specs = [ExpertSpec(**options, balancing_bias=has) for has in biased]
    made = [Router(4, spec, kernels).double() for spec in specs]
    for router in made:
        nn.init.eye_(router.weight)
    return made


def bias_of(router: Router) -> list[float]:
    """Return the biases of its experts."""
    assert router.e_score_correction_bias is not None
    return router.e_score_correction_bias.tolist()


def open_phase(local_routers: Sequence[Router], mesh: Any, adapters: Sequence[Any] = (), **settings: Any) -> RouterBias:
    """Return the phase, opened."""
    phase = RouterBias(
        stages=FixedStages([nn.ModuleList(local_routers)], adapters), mesh=mesh, device=Machine(), **settings
    )
    phase.open()
    return phase


def send(routers: Sequence[Router], *counts: int) -> None:
    """Send `counts` tokens to the experts, in training."""
    tokens = (40 * torch.eye(4, dtype=torch.float64) - 20).repeat_interleave(torch.tensor(counts), 0)[None]
    for router in routers:
        router(tokens, torch.ones(tokens.shape[:2]))


def test_biases_move_by_the_sign_of_the_missing_load(one_rank: Any) -> None:
    """They move up below the mean load of all microbatches, down above it, not at the mean; each step counts anew."""
    first, plain, last = all_routers = routers(True, False, True)
    phase = open_phase(all_routers, one_rank, update_rate=0.25)
    send(all_routers, 5, 1, 0, 0)
    send(all_routers, 0, 2, 2, 2)  # in all 5, 3, 2, 2, of which the mean is 3
    phase.run_phase(Step(1, 9))
    for router in (first, last):
        assert bias_of(router) == [-0.25, 0.0, 0.25, 0.25]
    assert plain.e_score_correction_bias is None
    send(all_routers, 1, 1, 1, 5)
    phase.run_phase(Step(2, 9))
    assert bias_of(first) == [0.0, 0.25, 0.5, 0.0]
    phase.run_phase(Step(3, 9))  # a step without tokens
    assert bias_of(first) == [0.0, 0.25, 0.5, 0.0]
    phase.close()
    send(all_routers, 9, 0, 0, 0)
    phase.run_phase(Step(4, 9))
    assert bias_of(first) == [0.0, 0.25, 0.5, 0.0]


def test_tokens_of_other_ranks_count(mesh_of: Any) -> None:
    """All local tokens go to expert 0; with another rank's tokens expert 1 has most."""
    [router] = all_routers = routers(True)
    phase = open_phase(all_routers, mesh_of(replica_group=Other(torch.tensor([[0, 9, 0, 0]]))), update_rate=1.0)
    send(all_routers, 4, 0, 0, 0)
    phase.run_phase(Step(1, 1))
    assert bias_of(router) == [-1.0, -1.0, 1.0, 1.0]


def test_a_skipped_step_changes_nothing_and_is_forgotten(one_rank: Any) -> None:
    """The host may know that the step is skipped, or the device alone."""
    [router] = all_routers = routers(True)
    phase = open_phase(all_routers, one_rank, update_rate=1.0)
    for step in (make_skipped_step(1, 9), Step(2, 9, LateState({"skip": torch.ones(())}))):
        send(all_routers, 4, 0, 0, 0)
        phase.run_phase(step)
        assert bias_of(router) == [0.0] * 4
    send(all_routers, 0, 4, 0, 0)
    phase.run_phase(Step(3, 9, LateState({"skip": torch.zeros(())})))
    assert bias_of(router) == [1.0, -1.0, 1.0, 1.0]


def test_equal_loads_come_from_unequal_scores(one_rank: Any) -> None:
    """Over 300 steps, a router whose scores favour two of four experts comes to use all alike."""
    torch.manual_seed(0)
    [router] = all_routers = routers(True)
    phase = open_phase(all_routers, one_rank, update_rate=0.01)
    shares = []
    for number in range(300):
        tokens = torch.randn(1, 256, 4, dtype=torch.float64) + torch.tensor([2.0, 1.0, 0.0, -1.0])
        chosen, _ = router(tokens, torch.ones(1, 256))
        shares.append(chosen.flatten().bincount(minlength=4) / 256)
        phase.run_phase(Step(number + 1, 300))
    assert shares[0].max() > 0.6 and shares[0].min() < 0.05
    late = torch.stack(shares[-50:]).mean(0)
    assert late.min() > 0.22 and late.max() < 0.28


def test_a_model_without_such_routers_is_refused(one_rank: Any) -> None:
    """The error comes before the first step."""
    with pytest.raises(UserError, match="no router of the model has a bias"):
        open_phase(routers(False), one_rank)


def test_adapters_freeze_biases_with_their_routers(one_rank: Any) -> None:
    """An adapter for PEFT would lack them; a frozen router in a model without adapters keeps moving."""
    for adapters, moved in (([FullTuning(targets=["mlp.gate"])], [0.0] * 4), ([], [-1.0, 1.0, 1.0, 1.0])):
        frozen, tuned = all_routers = routers(True, True)
        frozen.requires_grad_(False)
        phase = open_phase(all_routers, one_rank, adapters, update_rate=1.0)
        send(all_routers, 4, 0, 0, 0)
        phase.run_phase(Step(1, 1))
        assert bias_of(frozen) == moved and bias_of(tuned) == [-1.0, 1.0, 1.0, 1.0]
    tuned.requires_grad_(False)
    with pytest.raises(UserError, match=r"the adapters freeze every router.*or tune routers in full"):
        open_phase(all_routers, one_rank, [FullTuning(targets=["norm"])])
