"""Stages of a pipeline: modules of some layers, how ranks share their parameters, and what changes these."""

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
What the backward pass computes again: "none" is nothing, "blocks" every block, a number n the first of every n blocks,
"selective" norms, gates and rotations, whose inputs are kept anyway.
"""


class Shards(Protocol):
    """
    A stage's parameters on several data-parallel ranks: gathered before they are used, if each has a slice; their
    gradients reduced.
    """

    @property
    def by_block(self) -> bool:
        """Whether each block is gathered when it is used, so that the program need not gather the stage."""
        ...

    @property
    def by_microbatch(self) -> bool:
        """Whether gradients are added to the slices of ranks after each microbatch, and not only after the last."""
        ...

    def unshard(self) -> None:
        """Start to gather the whole stage."""
        ...

    def reshard(self) -> None:
        """Free what was gathered."""
        ...

    def reduce_next(self, final: bool) -> None:
        """Gradients are reduced with the stage's next backward pass; `final`, if they are those of the step then."""
        ...

    def reduced(self) -> None:
        """That pass is done: later ones add up gradients on this rank."""
        ...

    def parts(self) -> Sequence["ReducedPart"]:
        """Parts of the parameters, in the order in which all ranks reduce gradients that no hook of autograd tells."""
        ...

    def reduce(self) -> None:
        """Reduce the gradients that no part had, and end the reduction."""
        ...


@attrs.frozen(eq=False)
class ReducedPart:
    """Parameters (by the ids of these tensors) whose gradients are reduced together; `reduce` begins that."""

    parameters: Set[int]
    reduce: Callable[[], None]


@attrs.frozen
class Stage:
    """
    One stage of the pipeline that this rank owns: its number, how many there are in all, and its real module.

    The last stage's module holds the loss's, too, as `loss`.
    The module computes with its own parameters. Where these are casts, `masters` holds what they are cast from; where
    they are gathered from the `shards` of several ranks, it holds this rank's slices. `adapters` have been injected
    into the module; without any, every parameter is trained unless a transform froze it. Of parameters in `splits`
    the module has slices, and other ranks the others. `recompute` says what the backward passes compute again;
    `capture`, whether passes are launched as CUDA graphs.
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
        """What exports and, if it is trained, checkpoints save: each parameter's master, or itself if it has none."""
        for name, parameter in self.module.named_parameters():
            yield name, self.masters.get(name, parameter)

    def model_parameters(self) -> dict[str, ModelParameter]:
        """The model's parameters by name, without the loss's."""
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
        """The model's persistent buffers by name, which are whole on each rank, without the loss's."""
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
    """Stages whose modules may compute with casts of the parameters that the optimizer keeps."""

    def cast_weights(self, only_if_changed: bool = False) -> None:
        """
        Before the forward passes of a step: cast parameters to what layers compute with.

        `only_if_changed` does it only if a step was taken since the last time, or a parameter was changed in place.
        """
        ...

    def hand_over_gradients(self) -> None:
        """After the backward passes of a step: gradients are those of the parameters that the optimizer keeps."""
        ...


@port
class StageInputs(Protocol):
    """Shapes and dtypes of what is sent between stages."""

    def boundary(self, stage: int, inputs: Any, shared: BatchContext) -> Any:
        """What a stage takes for a microbatch with these inputs: a tree of tensors on the meta device."""
        ...


@port
class Parameters(Protocol):
    """
    The parameters that this rank trains, as the optimizer keeps them, in `precision.parameter`; of sharded ones its
    slices.

    Layers may compute with casts of them (`TrainableStages`): a parameter is changed in place, and the forward passes
    of the next step use the new values. Between forward_backward and the optimizer the gradient of each is its `.grad`,
    summed over this rank's microbatches, in `precision.gradient`; it is None if nothing reached the parameter.
    Clippers, metrics and optimizers read and change it there, and the optimizer sets it to None.
    """

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Fully qualified names and parameters, each once, in a stable order."""
        ...

    def slices(self) -> dict[str, TensorSlice | None]:
        """Of each of these parameters, the slice that this rank has; None for a whole one."""
        ...


@port
class AveragedWeights(Protocol):
    """Averages of the trained weights over steps."""

    def averages(self) -> Mapping[str, Tensor]:
        """The averages (any shape, at least float32) of this rank's slices by parameter; none before the first step."""
        ...

    def swapped(self) -> AbstractContextManager[None]:
        """While it is open the averages are in place of the weights, which come back unchanged, also after an error."""
        ...


def averaged(average: AveragedWeights | None) -> AbstractContextManager[None]:
    """The averages in place of the weights, if there are any."""
    return nullcontext() if average is None else average.swapped()


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient (any shape), in place; zeros where nothing reached it: all ranks sum the same tensors."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return parameter.grad


IN_PARAMETERS = frozenset({"weights", "local_gradients", "gradients"})
"""Values of a step's dataflow that phases find in the port Parameters, and not in the state of the step."""


@port
class SpreadParameters(Parameters, Protocol):
    """The parameters of a model over pipeline ranks; some, such as a tied embedding, are on several ranks."""

    def counted(self) -> list[tuple[str, nn.Parameter]]:
        """Those of `named` that count on this rank: each parameter of the model counts on exactly one."""
        ...

    def sum_gradients(self) -> None:
        """Sum the gradient of each parameter over the ranks that hold it, as far as backward passes have not."""
        ...


@port
class Transform(Protocol):
    """Changes a stage's module while it is on the meta device; see `FusedBackward`."""

    def transform(self, module: nn.Module) -> nn.Module:
        """The module to use instead."""
        ...


@runtime_checkable
class FusedBackward(Protocol):
    """
    A model or transform whose modules compute weight gradients together with the gradients of their inputs.

    torch.utils.checkpoint and torch.compile do. `check` warns of it with a schedule that puts weight gradients off.
    """

    fuses_backward: ClassVar[bool]


def fuses_backward(component: object) -> bool:
    """Return whether a model or transform, an object or a class, computes weight gradients with those of inputs."""
    return isinstance(component, FusedBackward) and component.fuses_backward
