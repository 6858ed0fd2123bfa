"""Ports for pipeline stages: their modules, their sharded parameters, and components that change them."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.ports.adapters import Adapter
from drawloom.components.ports.model import BatchContext, Finish, LayerRange, Model, list_quantized_parameter_formats
from drawloom.components.ports.parameter_roles import Role
from drawloom.components.ports.slices import ModelParameter, QuantizedParameter, RankSlice, TensorSlice
from drawloom.graph import port

ReadFrozen = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""Function that returns the initial values of a whole frozen parameter, from its name, shape and dtype."""

LOSS = "loss"
"""The name under which the last stage's module holds the module of the loss, if the loss has one."""


Recompute = int | Literal["none", "blocks", "selective", "quantized"]
"""
Policy of activation checkpointing: "none" recomputes nothing in the backward pass, "blocks" every block, a number n the
first of every n blocks, and "selective" norms, gates and rotations, whose inputs are kept anyway. "quantized" is
"selective" with the inputs of norms and gates in 8 bits, which rounds gradients.
"""


class Shards(Protocol):
    """
    A stage's parameters on several data-parallel ranks, which gather sharded parameters before use and reduce gradients
    (FSDP, DDP).
    """

    @property
    def gathers_per_block(self) -> bool:
        """Whether blocks are gathered before use, so the program need not gather the stage."""

    @property
    def reduces_per_microbatch(self) -> bool:
        """Whether gradients are reduced after every microbatch instead of only after the last."""

    def start_unshard(self) -> None:
        """Start to gather the whole stage's parameters."""

    def reshard(self) -> None:
        """Free the gathered parameters."""

    def reduce_in_next_backward(self, is_last_in_step: bool) -> None:
        """Reduce gradients with the stage's next backward pass; `is_last_in_step` marks the step's last reduction."""

    def stop_reducing_in_backward(self) -> None:
        """End the backward pass announced by `reduce_in_next_backward`; later passes only accumulate gradients."""

    def finish_reduction(self) -> None:
        """Reduce the remaining gradients, and wait for all sums; on a GPU only the stream waits."""

    def list_whole_parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters with which passes compute in place of the module's slices."""

    def list_reduction_units(self) -> Sequence["ReductionUnit"]:
        """Return the parameter groups for the executor itself to reduce, in an order common to all ranks."""

    def reduce_remaining_gradients(self) -> None:
        """Reduce the remaining gradients, in no group of `list_reduction_units`, and end the reduction."""


@attrs.frozen(eq=False)
class ReductionUnit:
    """Parameters, as ids of tensors, whose gradients one call to `reduce` starts to reduce together."""

    parameters: Set[int]
    reduce: Callable[[], None]


@attrs.frozen
class Stage:
    """
    One pipeline stage on this rank: its index, the stage count, and its real module.

    The last stage's module contains the loss's module, as `loss`. The module computes with its own parameters.
    `masters` maps names to the master weights, if the module's parameters are casts; if parameters are gathered from
    `shards` on several ranks, `masters` has this rank's slices. `adapters` have been injected into the module; without
    adapters every parameter is trained, unless a transform froze it. `splits` has this rank's slices for parameters
    that ranks compute with in slices. `recompute` is the activation checkpointing policy. `read_or_draw_frozen_values`
    reads the values of frozen parameters that the module stores in a quantized format.
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
    read_or_draw_frozen_values: ReadFrozen | None = None

    def named_masters_or_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """
        Yield the parameters' master weights, or the parameters without masters: exports and checkpoints save these.
        """
        for name, parameter in self.module.named_parameters():
            yield name, self.masters.get(name, parameter)

    def gatherable_parameters(self) -> dict[str, ModelParameter]:
        """Return the parameters, also the loss's, by name."""
        named = self.named_masters_or_parameters()
        if self.shards is not None:
            self.shards.reshard()  # what a forward has gathered may be in another dtype
            named = self.module.named_parameters()
        parameters = {name: ModelParameter(parameter, self.splits.get(name)) for name, parameter in named}
        if (read_or_draw_frozen_values := self.read_or_draw_frozen_values) is not None:
            for name, weight_format in list_quantized_parameter_formats(self.module).items():
                stored = parameters[name]
                shape = weight_format.weight_shape(stored.shape)
                read = partial(read_or_draw_frozen_values, name, shape, stored.dtype)
                parameters[name] = QuantizedParameter(tensor=stored.tensor, weight_shape=shape, read=read)
        return parameters

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Return the module's persistent buffers (any shape) by name; buffers are whole on every rank."""
        saved = self.module.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self.module.named_buffers() if name in saved}


@port
class Stages(Protocol):
    """This rank's stages, with parameters on its device."""

    @property
    def local(self) -> list[Stage]:
        """This rank's stages, in order."""

    def cast_weights(self, only_if_changed: bool = False) -> None:
        """
        Cast parameters to the dtypes for computation, before a step's forward passes.

        With `only_if_changed`, cast only after a step was taken or a parameter was changed in place.
        """

    def move_gradients_to_masters(self) -> None:
        """Pass gradients to the optimizer's parameters, such as master weights, after a step's backward passes."""

    def infer_stage_inputs(self, stage: int, inputs: Any, shared: BatchContext) -> Any:
        """Return meta tensors, as a tree, in place of the tensors received by `stage` for a microbatch."""

    @property
    def initial_folder(self) -> Path | None:
        """The folder that the initial weights were read from; None for random weights."""

    @property
    def adapters(self) -> Sequence[Adapter]:
        """The adapters; empty if all weights are trained."""


@port
class DescribedStages(Protocol):
    """Stages of a model, and of features around it, known before they are open."""

    model: Model

    def describe_features(self, whole: nn.Module) -> Iterator[str]:
        """Yield phrases for the run's summary, given the whole model on the meta device."""


@port
class FrozenModel(Protocol):
    """
    A frozen second model with its own stages on the same ranks: a teacher, or a reference model.

    An executor runs its forward passes with the schedule's stages per rank, for a loss that compares both models.
    """

    def build_meta_stages(self) -> None:
        """Build this rank's stages without memory and values, for plans."""

    def infer_meta_outputs(self, inputs: Any, context: BatchContext, finish: Finish) -> Any:
        """Return `finish`'s result for a microbatch, a tree of meta tensors; after `build_meta_stages`."""


@port
class Parameters(Protocol):
    """
    This rank's trained parameters for the optimizer, in `precision.parameter`; slices if sharded.

    Layers may compute with casts: change a parameter in place, and the next step's forward passes use the new values.
    After gradients.synchronize, `.grad` is the mean gradient per token over the whole step, in `precision.gradient`: of
    the whole parameter, equal on all ranks that have it, or of this rank's slice. Clippers, metrics and optimizers read
    and change it, and the optimizer sets it to None. Before, it is a sum over this rank's microbatches (gradient
    accumulation), to which some ranks' sums may have been added during backward passes, or None if no gradient reached
    the parameter; only `sum_remaining_gradients` reads it then. A parameter may be on several ranks: a norm or a count
    takes `owned_parameters`, and adds up over ranks with the port Reduce.
    """

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return fully qualified names and parameters, without repetition, in a stable order."""

    def parameter_slices(self) -> dict[str, TensorSlice | None]:
        """Return this rank's slices by parameter; None for a whole parameter."""

    def roles(self) -> Mapping[str, Role]:
        """Return the roles by parameter, on which weight decay and orthogonalization depend."""

    def owned_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that this rank owns. Every model parameter is owned by exactly one rank."""

    def sum_remaining_gradients(self) -> None:
        """Sum gradients over the ranks with the same parameter, unless the backward passes already did."""


@port
class AveragedWeights(Protocol):
    """Averages over steps for trained weights."""

    def averages(self) -> Mapping[str, Tensor]:
        """
        Return this rank's averages (any shape, at least float32) by parameter; {} before the first step.
        """

    def use_averages(self) -> AbstractContextManager[None]:
        """
        Replace the weights by the averages inside the context, and restore the weights on exit, also after an error.
        """


def use_averages_if_any(average: AveragedWeights | None) -> AbstractContextManager[None]:
    """Return a context that replaces the weights by the averages, if there are any."""
    return nullcontext() if average is None else average.use_averages()


def get_or_create_gradient(parameter: nn.Parameter) -> Tensor:
    """
    Return a parameter's gradient (any shape), not a copy; set it to zeros if it is None, because all ranks reduce the
    same tensors.
    """
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return parameter.grad


IN_PARAMETERS = frozenset({"weights", "local_gradients", "gradients"})
"""Values of a step's dataflow that phases read from the port Parameters instead of the step's state."""


@runtime_checkable
class FusedBackward(Protocol):
    """
    A model or feature that computes weight gradients together with input gradients.

    torch.utils.checkpoint (activation checkpointing) and torch.compile do so. `check` warns if the schedule delays
    weight gradients.
    """

    fuses_backward: ClassVar[bool]


def computes_both_gradients_at_once(component: object) -> bool:
    """
    Return whether a model or feature, an object or a class, computes weight gradients together with input gradients.
    """
    return isinstance(component, FusedBackward) and component.fuses_backward


@port
class ModelExport(Protocol):
    """Writer of the model for other libraries."""

    def gather_and_export_to(self, target: Path) -> None:
        """
        Write the current weights, with merged adapters, as a Hugging Face folder. A collective over all ranks.

        Raises UserError on every rank if the folder exists, or a rank can't write.
        """
