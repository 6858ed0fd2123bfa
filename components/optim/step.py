"""What every optimizer of torch does in a step: apply the gradients at the step's rate, unless it is refused."""

import torch

from drawloom.components.ports.run import Step


def apply(optimizer: torch.optim.Optimizer, rate: float, step: Step) -> None:
    """Step once at `rate` times the step's factor, which is left as `lr`; gradients are gone afterwards."""
    step.values["lr"] = rate * step.values.get("rate_factor", 1.0)
    for group in optimizer.param_groups:
        group["lr"] = step.values["lr"]
    if not step.refused:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
