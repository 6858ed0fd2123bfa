"""Ports of pipeline stages: their modules, their sharded parameters, and components that change them."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.ports.adapters import Adapter
from drawloom.components.ports.model import BatchContext, LayerRange
from drawloom.components.ports.slices import ModelParameter, RankSlice, TensorSlice
from drawloom.graph import port

LOSS = "loss"
"""The name under which the last stage's module holds the module of the loss, if the loss has one."""


Recompute = int | Literal["none", "blocks", "selective"]
"""
Policy of activation checkpointing: "none" recomputes nothing in the backward pass, "blocks" every block, a number n the
first of every n blocks, and "selective" norms, gates and rotations, whose inputs are kept anyway.
"""


class Shards(Protocol):
    """
    A stage's parameters on several data-parallel ranks, which gather sharded parameters before use and reduce gradients
    (FSDP, DDP).
    """

    @property
    def by_block(self) -> bool:
        """Whether each block is gathered before its use, so that the program need not gather the stage."""
        ...

    @property
    def by_microbatch(self) -> bool:
        """Whether gradients are reduced after each microbatch instead of only after the last."""
        ...

    def unshard(self) -> None:
        """Start to gather the parameters of the whole stage."""
        ...

    def reshard(self) -> None:
        """Free the gathered parameters."""
        ...

    def reduce_next(self, final: bool) -> None:
        """Reduce gradients with the stage's next backward pass; `final` marks the last reduction of the step."""
        ...

    def end_reduction(self) -> None:
        """End the backward pass that `reduce_next` announced; later passes accumulate gradients on this rank."""
        ...

    def parts(self) -> Sequence["ReducedPart"]:
        """
        Return groups of parameters whose gradients no autograd hook reports, in the order in which all ranks reduce
        them.
        """
        ...

    def reduce(self) -> None:
        """Reduce the gradients that no part reduced, and end the reduction."""
        ...


@attrs.frozen(eq=False)
class ReducedPart:
    """Parameters (by the ids of their tensors) with gradients that are reduced together, from `reduce` on."""

    parameters: Set[int]
    reduce: Callable[[], None]


@attrs.frozen
class Stage:
    """
    One pipeline stage of this rank: its index, the number of all stages, and its real module.

    The last stage's module contains the loss's module, as `loss`. The module computes with its own parameters.
    `masters` maps names to the master weights, if the module's parameters are casts of them; if parameters are gathered
    from `shards` on several ranks, `masters` has this rank's slices. `adapters` have been injected into the module;
    without adapters every parameter is trained, unless a transform froze it. `splits` has this rank's slice of each
    parameter that several ranks compute with in slices. `recompute` is the policy of activation checkpointing.
    `capture` is True if passes are launched as CUDA graphs.
    """

    index: int
    count: int
    span: LayerRange
    module: nn.Module
    masters: Mapping[str, nn.Parameter] = attrs.field(factory=dict)
    shards: Shards | None = None
    adapters: Sequence[Adapter] = ()
    splits: Mapping[str, RankSlice] = attrs.field(factory=dict)
    recompute: Recompute = "none"
    capture: bool = False

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """
        Yield each parameter's master weight, or the parameter itself without one: exports and checkpoints save these.
        """
        for name, parameter in self.module.named_parameters():
            yield name, self.masters.get(name, parameter)

    def model_parameters(self) -> dict[str, ModelParameter]:
        """Return the model's parameters by name, without the loss's."""
        named = self.named_parameters()
        if self.shards is not None:
            self.shards.reshard()  # what a forward has gathered may be in another dtype
            named = self.module.named_parameters()
        return {
            name: ModelParameter(parameter, self.splits.get(name))
            for name, parameter in named
            if not name.startswith(f"{LOSS}.")
        }

    def model_buffers(self) -> dict[str, ModelParameter]:
        """Return the model's persistent buffers by name, without the loss's; they are whole on each rank."""
        saved = self.module.state_dict(keep_vars=True)
        named = ((name, buffer) for name, buffer in self.module.named_buffers() if name in saved)
        return {
            name: ModelParameter(buffer, is_buffer=True) for name, buffer in named if not name.startswith(f"{LOSS}.")
        }


@port
class Stages(Protocol):
    """This rank's stages, with parameters on its device."""

    @property
    def local(self) -> list[Stage]:
        """This rank's stages, in order."""
        ...


@port
class TrainableStages(Stages, Protocol):
    """Stages with modules that may compute with casts of the optimizer's parameters."""

    def cast_weights(self, only_if_changed: bool = False) -> None:
        """
        Cast parameters to the dtypes that layers compute with, before the forward passes of a step.

        With `only_if_changed`, cast only after a step was taken or a parameter was changed in place.
        """
        ...

    def hand_over_gradients(self) -> None:
        """Give gradients to the parameters that the optimizer updates, after the backward passes of a step."""
        ...


@port
class StageInputs(Protocol):
    """Shapes and dtypes of the tensors that are sent between stages."""

    def boundary(self, stage: int, inputs: Any, shared: BatchContext) -> Any:
        """Return the inputs of `stage` for a microbatch with these inputs: a tree of tensors on the meta device."""
        ...


@port
class Parameters(Protocol):
    """
    Trained parameters of this rank, as the optimizer updates them, in `precision.parameter`; slices of sharded ones.

    Layers may compute with casts (`TrainableStages`): change a parameter in place, and the forward passes of the next
    step use the new values. Between forward_backward and the optimizer, `.grad` is the gradient summed over this rank's
    microbatches (gradient accumulation), in `precision.gradient`; it is None if no gradient reached the parameter.
    Clippers, metrics and optimizers read and change `.grad`, and the optimizer sets it to None.
    """

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return fully qualified names and parameters, each once, in a stable order."""
        ...

    def slices(self) -> dict[str, TensorSlice | None]:
        """Return this rank's slice of each of these parameters; None for a whole parameter."""
        ...


@port
class AveragedWeights(Protocol):
    """Averages of the trained weights over steps."""

    def averages(self) -> Mapping[str, Tensor]:
        """
        Return the averages (any shape, at least float32) of this rank's slices by parameter; {} before the first step.
        """
        ...

    def swap_in(self) -> AbstractContextManager[None]:
        """
        Replace the weights by the averages inside of the context, and restore the weights on exit, also after an error.
        """
        ...


def averaged(average: AveragedWeights | None) -> AbstractContextManager[None]:
    """Return a context that replaces the weights by the averages, if there are any."""
    return nullcontext() if average is None else average.swap_in()


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """
    Return a parameter's gradient (any shape), not a copy; set it to zeros if it is None, because all ranks reduce the
    same tensors.
    """
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return parameter.grad


IN_PARAMETERS = frozenset({"weights", "local_gradients", "gradients"})
"""Values of a step's dataflow that phases read from the port Parameters instead of the step's state."""


@port
class SpreadParameters(Parameters, Protocol):
    """The parameters of a model over pipeline ranks; a tied embedding, for example, is on several ranks."""

    def counted(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that this rank owns. Every model parameter is owned by exactly one rank."""
        ...

    def sum_gradients(self) -> None:
        """Sum each parameter's gradient over the ranks that have it, unless the backward passes already did."""
        ...


@port
class Transform(Protocol):
    """A change of a stage's module on the meta device; see `FusedBackward`."""

    def transform(self, module: nn.Module) -> nn.Module:
        """Return the module that replaces `module`."""
        ...


@runtime_checkable
class FusedBackward(Protocol):
    """
    A model or transform with modules that compute weight gradients together with input gradients.

    torch.utils.checkpoint (activation checkpointing) and torch.compile do so. `check` warns if the schedule delays
    weight gradients.
    """

    fuses_backward: ClassVar[bool]


def fuses_backward(component: object) -> bool:
    """
    Return whether a model or transform, an object or a class, computes weight gradients together with input gradients.
    """
    return isinstance(component, FusedBackward) and component.fuses_backward
