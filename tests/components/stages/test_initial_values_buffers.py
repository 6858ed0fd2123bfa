"""Buffers of a module built on the meta device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drawloom.components.stages.initial_values import allocate_and_fill_buffers
from drawloom.graph import UserError

CPU = torch.device("cpu")


class Angles(nn.Module):
    """Frequencies in a non-persistent buffer, and a count in a persistent one."""

    frequencies: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(3), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.frequencies = 1 / torch.arange(1, 4)  # made anew, on whatever device is torch's default
        self.count.fill_(7)


class Drawn(nn.Module):
    """Random numbers."""

    noise: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.noise)


class Scaled(nn.Linear):
    """A buffer that the inherited `reset_parameters` does not fill."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("offset", torch.zeros(2))


class Constant(nn.Module):
    """A buffer that only the constructor fills."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(2))


def on_meta(build: Callable[[], nn.Module]) -> Any:
    """Return a module built on the meta device."""
    with torch.device("meta"):
        return build()


def test_every_buffer_has_the_values_of_its_module() -> None:
    """Every buffer, persistent or not, has the values of a module built on another device than meta."""
    module = on_meta(lambda: nn.ModuleDict({"angles": Angles(), "norm": nn.BatchNorm1d(3)}))
    allocate_and_fill_buffers(module, CPU, seed=1)
    expected = nn.ModuleDict({"angles": Angles(), "norm": nn.BatchNorm1d(3)})
    buffers = dict(module.named_buffers())
    assert len(buffers) == 5
    for name, buffer in expected.named_buffers():
        assert buffers[name].dtype == buffer.dtype and torch.equal(buffers[name], buffer), name


def test_only_owners_of_buffers_leave_the_meta_device() -> None:
    """A module without buffers stays on the meta device, as its parameters will be loaded."""
    module = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    allocate_and_fill_buffers(module, CPU, seed=1)
    assert [parameter.device.type for parameter in module.parameters()] == ["meta", "meta", "cpu", "cpu"]


def test_random_buffers_depend_on_seed_and_name() -> None:
    """Replicas have equal numbers, other modules have others, and the process's generators keep their state."""
    one, other = (on_meta(lambda: nn.ModuleDict({"a": Drawn(), "b": Drawn()})) for _ in range(2))
    torch.manual_seed(3)
    allocate_and_fill_buffers(one, CPU, seed=1)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), drawn)
    allocate_and_fill_buffers(other, CPU, seed=1)
    assert torch.equal(one["a"].noise, other["a"].noise) and not torch.equal(one["a"].noise, one["b"].noise)
    allocate_and_fill_buffers(other, CPU, seed=2)
    assert not torch.equal(one["a"].noise, other["a"].noise)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            Scaled,
            r"the module part \(Scaled\) registers the buffers scale, offset, but has a reset_parameters\(\) that",
        ),
        (Constant, r"the module part \(Constant\) registers the buffers mask, but has no reset_parameters\(\)"),
    ],
)
def test_a_buffer_that_is_not_filled_is_an_error(build: Callable[[], nn.Module], words: str) -> None:
    """The error names the module and the buffer, also if `reset_parameters` is inherited."""
    with pytest.raises(UserError, match=words):
        allocate_and_fill_buffers(on_meta(lambda: nn.ModuleDict({"part": build()})), CPU, seed=1)
