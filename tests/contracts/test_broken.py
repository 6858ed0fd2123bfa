"""Contracts find implementations that break them, and accept a plugin's plain ones."""

import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from drawloom.components.contracts.model import layers_keep_shape_and_dtype_if_declared
from drawloom.components.ports.checkpoint import Durable, Stateful
from drawloom.components.ports.distributed import ReplicaLimit
from drawloom.components.ports.features import StageFeature
from drawloom.components.ports.model import BatchContext, LayerRange
from drawloom.components.ports.run import FinalTask, Phase, Step
from drawloom.components.ports.stages import Parameters
from drawloom.graph import component
from drawloom.graph.testing import BrokenContractError, check_port, fake


@component(reads=("loss",), writes=("doubled",))
class Doubles:
    """Reads and writes what it declares."""

    def run_phase(self, step: Step) -> None:
        """Write twice the loss."""
        step.state["doubled"] = 2 * step.state["loss"]


@component
class ReadsInSecret:
    """Reads a value without declaring it."""

    def run_phase(self, step: Step) -> None:
        """Read the loss."""
        step.state["loss"]


@component
class WritesInSecret:
    """Writes a value without declaring it."""

    def run_phase(self, step: Step) -> None:
        """Write a value."""
        step.state["secret"] = 1


@component
class Skips:
    """Changes the step's number."""

    def run_phase(self, step: Step) -> None:
        """Go to the next step."""
        step.index += 1


@component(reads=("tokens",), writes=("doubled",))
class ReadsBesideTokens:
    """Reads a value without declaring it, beside a declared one."""

    def run_phase(self, step: Step) -> None:
        """Read the loss after the tokens."""
        step.state["doubled"] = 2 * step.state["tokens"] + step.state.get("loss", 0)


@component(reads=("plans_of_a_plugin",))
class WritesBesideOwnValue:
    """Writes a value without declaring it, and then reads a plugin's value."""

    def run_phase(self, step: Step) -> None:
        """Write a value, and fail at the other one."""
        step.state["secret"] = 1
        step.state["plans_of_a_plugin"].items()


@component
class Averages:
    """Averages without declared slices."""

    parameters: Parameters
    _averages: dict[str, Tensor] = attrs.field(init=False, factory=dict)

    def open(self) -> None:
        """Copy the parameters."""
        self._averages = {name: part.detach().clone() for name, part in self.parameters.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by parameter."""
        return {name: {"average": part} for name, part in self._averages.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy saved averages."""
        for name, part in self._averages.items():
            part.copy_(state[name]["average"])


def make_averages() -> Averages:
    """Return a parameter's averages."""
    return Averages(parameters=fake(Parameters, named_parameters=[("weight", nn.Parameter(torch.ones(2, 3)))]))


class Wraps(StageFeature):
    """A feature to hide a module in another."""

    def transform(self, module: nn.Module) -> nn.Module:
        """Return the module inside of another."""
        return nn.Sequential(module)


class Materializes(StageFeature):
    """A feature to make a module real."""

    def transform(self, module: nn.Module) -> nn.Module:
        """Return the module on the CPU."""
        return module.to_empty(device="cpu")


class Frozen(StageFeature):
    """A feature as a plugin may write one."""

    def transform(self, module: nn.Module) -> nn.Module:
        """Return the module, frozen."""
        return module.requires_grad_(False)


class NeverFinished:
    """A task unaware of its completed run."""

    def has_result_of_step(self, step: int) -> bool:
        """False."""
        return False

    def run_after_training(self, step: int) -> None:
        """Do nothing."""


class FitsNothing:
    """Work that can't be shared by any number of replicas, not even by one."""

    def supports_replica_count(self, count: int) -> bool:
        """False."""
        return False


class OneThread:
    """A log whose flush fails outside its own thread."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()

    def flush(self) -> None:
        """Refuse other threads."""
        if threading.current_thread() is not self.thread:
            raise RuntimeError("another thread")


BROKEN: list[tuple[Callable[[], Any], type, str]] = [
    (ReadsInSecret, Phase, "reads loss without declaring it"),
    (WritesInSecret, Phase, "writes secret without declaring it"),
    (Skips, Phase, "changes the index"),
    (ReadsBesideTokens, Phase, "reads loss without declaring it"),
    (WritesBesideOwnValue, Phase, "writes secret without declaring it"),
    (make_averages, Stateful, "write the method `state_slices`"),
    (Wraps, StageFeature, "called otherwise"),
    (Materializes, StageFeature, "made real"),
    (NeverFinished, FinalTask, "has run and is not finished"),
    (FitsNothing, ReplicaLimit, "no number of replicas"),
    (OneThread, Durable, "in another thread"),
]


@pytest.mark.parametrize(("implementation", "port", "message"), BROKEN, ids=lambda item: getattr(item, "__name__", ""))
def test_a_broken_implementation_is_refused(implementation: Callable[[], Any], port: type, message: str) -> None:
    """An implementation with one fault fails the property that states it."""
    with pytest.raises(BrokenContractError, match=message):
        check_port(implementation, port)


@pytest.mark.parametrize(("implementation", "port"), [(Doubles, Phase), (Frozen, StageFeature)])
def test_a_plain_implementation_passes(implementation: Callable[[], Any], port: type) -> None:
    """An implementation as a plugin may write it keeps the contract."""
    check_port(implementation, port)


class _Span(nn.Module):
    """An embedding, or a layer that gives float64."""

    def __init__(self, embedding: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8) if embedding else None

    def forward(self, inputs: Tensor, shared: BatchContext) -> Any:
        return inputs.double() if self.embedding is None else self.embedding(inputs)


class SaysThatItKeepsShapes:
    """A model of three layers; the second returns another dtype than its input's."""

    layers_keep_shapes = True
    num_hidden_layers = 3

    def build(self, span: LayerRange) -> nn.Module:
        """Return a span's module."""
        return _Span(span.embedding)


def test_a_layer_that_changes_the_dtype_breaks_its_models_word() -> None:
    """A model may not say that its layers keep shapes where one does not."""
    implementation: Any = SaysThatItKeepsShapes()
    with pytest.raises(BrokenContractError, match=r"layer 1 gives torch.float64 \(2, 5, 8\), and takes torch.float32"):
        layers_keep_shape_and_dtype_if_declared(implementation)


class Counter:
    """A stateful node with undeclared sharding over ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore nothing."""

    def state_slice(self) -> dict[str, None]:
        raise NotImplementedError


def test_a_misspelt_capability_breaks_the_contract() -> None:
    """A node whose slices nobody would ask for does not pass as a node without slices."""
    with pytest.raises(BrokenContractError, match=r"Counter has state_slice, .* did you mean state_slices"):
        check_port(Counter, Stateful)
