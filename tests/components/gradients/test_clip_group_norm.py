"""Clipping parameter groups by norms of any order, compared with torch's on the whole gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.gradients.clip_group_norm import ClipGroupNorm
from drawloom.components.ports.run import Step
from drawloom.components.ports.stages import Role, default_role
from drawloom.graph import UserError
from drawloom.graph.project import Recipe


class Held:
    """Parameters with gradients."""

    def __init__(self, **gradients: Tensor) -> None:
        self.parameters = {name: nn.Parameter(torch.zeros_like(gradient)) for name, gradient in gradients.items()}
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient.clone()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [*self.parameters.items()]

    def parameter_slices(self) -> dict[str, Any]:
        return dict.fromkeys(self.parameters)

    def roles(self) -> dict[str, Role]:
        return {name: default_role(name, part) for name, part in self.named_parameters()}

    owned_parameters = named_parameters

    def sum_remaining_gradients(self) -> None: ...


class Other:
    """Another rank with a known norm: a sum of powers, or a maximum."""

    def __init__(self, norm: float = 0.0) -> None:
        self.norm = norm

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        return value + self.norm

    def max_over_ranks(self, value: Tensor) -> Tensor:
        return value.clamp_min(self.norm)


def clip_gradients(stages: Held, reduce: Any, **settings: Any) -> list[Tensor]:
    """Return the gradients afterwards."""
    device = ComputeDevice(kind="cpu")
    device.open()
    ClipGroupNorm(parameters=stages, reduce=reduce, device=device, **settings).run_phase(Step(1, 1))
    return [parameter.grad for _, parameter in stages.named_parameters() if parameter.grad is not None]


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_clipping_is_torchs_for_every_order(p: Any, max_norm: float) -> None:
    """All gradients are scaled as by clip_grad_norm_, also where a slice is empty."""
    torch.manual_seed(0)
    stages = Held(a=torch.randn(3, 4), b=torch.randn(0, 2), c=torch.randn(5))
    expected = [nn.Parameter(torch.zeros_like(part)) for _, part in stages.named_parameters()]
    for mine, (_, theirs) in zip(expected, stages.named_parameters(), strict=True):
        mine.grad = theirs.grad.clone()  # type: ignore[union-attr]
    torch.nn.utils.clip_grad_norm_([expected[0], expected[2]], max_norm, norm_type=float(p))
    for ours, theirs in zip(clip_gradients(stages, Other(), max_norm=max_norm, norm_type=p), expected, strict=True):
        torch.testing.assert_close(ours, theirs.grad)


@pytest.mark.parametrize(("p", "others", "norm"), [(2.0, 16.0, 5.0), (1.0, 2.0, 5.0), ("inf", 6.0, 6.0)])
def test_other_ranks_count_in_the_norm(p: Any, others: float, norm: float) -> None:
    """Powers are added over ranks, and the maximum is taken over ranks."""
    [gradient] = clip_gradients(Held(a=torch.tensor([3.0])), Other(others), max_norm=1.0, norm_type=p)
    torch.testing.assert_close(gradient, torch.tensor([3.0 / norm]))


@pytest.mark.parametrize("p", ["1", "inf", '"inf"'])
def test_a_recipe_may_write_any_order(p: str) -> None:
    """Infinity is written as TOML's number, or as a string."""
    words = "clip.use=gradients.clip_group_norm", "clip.max_norm=1.0", f"clip.norm_type={p}"
    given = {"stages": Held(), "reduce": Other(), "device": ComputeDevice(kind="cpu")}
    with Recipe.load("first_run", *words).open(only="clip", replacements=given) as run:
        assert run["clip"].norm_type == {"1": 1.0}.get(p, "inf")


def test_only_the_group_is_clipped() -> None:
    """Parameters matched by no pattern keep their gradients, and do not count."""
    stages = Held(first=torch.tensor([3.0]), norm=torch.tensor([4.0]))
    gradients = clip_gradients(stages, Other(), max_norm=1.0, targets=["*norm"])
    torch.testing.assert_close(gradients, [torch.tensor([3.0]), torch.tensor([1.0])])


def test_a_pattern_without_a_parameter_is_refused() -> None:
    """The message has the patterns and the name of a parameter."""
    with pytest.raises(UserError, match=r"no trained parameter matches \['b\*'\]; write patterns of names such as 'a'"):
        clip_gradients(Held(a=torch.ones(1)), Other(), max_norm=1.0, targets=["b*"])
