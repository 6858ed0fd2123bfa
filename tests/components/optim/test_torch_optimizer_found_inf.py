"""Steps skipped on the device, which the host learns a step later, beside the same steps skipped by the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.optim.adamw import AdamW
from drawloom.components.optim.adamw_step import AdamWTriton
from drawloom.components.optim.muon import Muon
from drawloom.components.optim.sgd import SGD
from drawloom.components.optim.stochastic_adamw import StochasticAdamW
from drawloom.components.ports.run import Step
from support.checkpoints import SingleRankMesh
from support.doubles import OneJob
from support.equality import assert_equal
from support.host_reads import NoHostReads
from support.kernels import DEVICE
from support.steps import LateState, make_skipped_step
from support.weights import Weights


def weights_of(dtype: torch.dtype, gradient: torch.dtype) -> Weights:
    """Return a matrix and a vector to train, with gradients in a dtype."""
    weights = Weights({"matrix": (4, 6), "vector": (6,)}, dtype, DEVICE)
    for _, parameter in weights.named_parameters():
        parameter.grad_dtype = gradient
    return weights


def give_gradients(weights: Weights, seed: int, finite: bool) -> None:
    """Set gradients, finite or not."""
    weights.give_gradients(seed)
    if not finite:
        for _, parameter in weights.named_parameters():
            assert parameter.grad is not None
            parameter.grad /= 0.0


def stochastic(parameters: Weights, **settings: Any) -> StochasticAdamW:
    """Return an optimizer on the device of the tests."""
    kind: Any = DEVICE.type
    return StochasticAdamW(parameters=parameters, job=OneJob(), device=ComputeDevice(kind=kind), **settings)


class ByTriton(AdamW):
    """AdamW with Triton everywhere, as on GPUs."""

    def open(self) -> None:
        """Create the optimizer of the parameters."""
        rates = {"lr": self.lr, "betas": self.betas, "eps": self.eps}
        self._optimizers = [AdamWTriton(self._create_torch_param_groups(), fused=True, **rates)]


BF16, FP32 = torch.bfloat16, torch.float32
OPTIMIZERS: dict[str, tuple[Callable[..., Any], torch.dtype, torch.dtype, dict[str, Any]]] = {
    "adamw": (AdamW, FP32, FP32, {}),
    "adamw, float32 gradients of bfloat16": (AdamW, BF16, FP32, {}),
    "adamw with amsgrad": (AdamW, FP32, FP32, {"amsgrad": True, "maximize": True}),
    "adamw by Triton": (ByTriton, BF16, FP32, {}),
    "muon": (Muon, FP32, FP32, {"targets": ["matrix"]}),
    "muon, float32 gradients of bfloat16": (Muon, BF16, FP32, {"targets": ["matrix"]}),
    "sgd": (SGD, FP32, FP32, {}),
    "sgd with nesterov": (SGD, FP32, FP32, {"nesterov": True, "maximize": True}),
    "sgd without momentum": (SGD, FP32, FP32, {"momentum": 0.0}),
    "stochastic": (stochastic, BF16, BF16, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_the_device_skips_is_one_that_the_host_skips(name: str) -> None:
    """
    Weights are bitwise equal after the compared steps, and the state after the last, the first step skipped or not. In
    an update the host reads nothing from the device.
    """
    make, dtype, gradient, settings = OPTIMIZERS[name]
    for skips in ({1, 3}, {2, 3, 5}):
        late, known = weights_of(dtype, gradient), weights_of(dtype, gradient)
        ours, theirs = (make(parameters=side, mesh=SingleRankMesh(), lr=0.1, **settings) for side in (late, known))
        ours.open()
        theirs.open()
        for index in range(1, 6):
            reason = "the norm is inf" if index in skips else ""
            step = Step(index, 5, LateState({}))
            step.skip_update_if(torch.tensor(index in skips, device=DEVICE), lambda reason=reason: reason)  # type: ignore[misc]
            give_gradients(late, index, finite=not reason)
            give_gradients(known, index, finite=True)
            ours.state_dict()  # the state of a checkpoint reads whether the last step was skipped
            with NoHostReads():
                ours.run_phase(step)
            theirs.run_phase(make_skipped_step(index, 5, reason) if reason else Step(index, 5))
            assert all(parameter.grad is None for _, parameter in late.named_parameters())
            assert_equal(dict(late.named_parameters()), dict(known.named_parameters()))
        assert_equal(ours.state_dict(), theirs.state_dict())
