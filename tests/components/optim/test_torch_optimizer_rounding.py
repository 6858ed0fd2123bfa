"""The warning that bfloat16 weights lose small updates, and its truth."""

import pytest
import torch

from drawloom import Recipe
from drawloom.components.optim.torch_optimizer import create_fastest_adamw

WARNING = "[optimizer] rounds bfloat16 to the nearest: updates of less than 1/512 of a weight are lost"
PURE = ("precision.parameter=bfloat16",)


def warnings(*words: str) -> list[str]:
    """Return `check`'s warnings."""
    return [str(problem) for problem in Recipe.load("first_run", *words).check()]


@pytest.mark.parametrize("name", ["adamw", "adam", "muon", "sgd"])
def test_check_warns_of_bfloat16_weights_without_masters(name: str) -> None:
    """The warning names stochastic rounding and float32 masters, and either one as it is written there ends it."""
    given = (f"optimizer.use=optim.{name}", "optimizer.lr=1e-3")
    [problem] = warnings(*given, *PURE)
    assert problem.startswith(f"command line: warning: [precision] {WARNING}; write ")
    assert 'use = "optim.stochastic_adamw" in [optimizer], or' in problem and "with_mixed_precision" in problem
    assert warnings("optimizer.use=optim.stochastic_adamw", "optimizer.lr=1e-3", *PURE) == []
    assert problem.endswith('parameter = "float32", compute = "bfloat16" (DL402)')
    assert warnings(*given, "precision.parameter=float32", "precision.compute=bfloat16") == []
    assert Recipe.load("first_run", *given, overlays="with_mixed_precision").check() == []


@pytest.mark.parametrize(("part", "stays"), [(1 / 512 - 1e-4, True), (1 / 256 + 1e-4, False)])
def test_updates_below_the_bound_are_lost(part: float, stays: bool) -> None:
    """AdamW's first steps, as large as the rate, change no weight below the bound, and all above twice the bound."""
    weights = torch.nn.Parameter(torch.tensor([1.0, 1.5, 1.9921875], dtype=torch.bfloat16))
    before = weights.detach().clone()
    for weight in range(3):
        optimizer = create_fastest_adamw(
            [{"params": [weights], "weight_decay": 0.0}], lr=0.0, betas=(0.9, 0.95), eps=1e-8
        )
        optimizer.param_groups[0]["lr"] = part * float(before[weight])
        weights.grad = torch.ones_like(weights)
        optimizer.step()
        assert (weights[weight] == before[weight]) == stays
        with torch.no_grad():
            weights.copy_(before)
