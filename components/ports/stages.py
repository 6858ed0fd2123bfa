"""Ports for pipeline stages: their modules, the roles of parameters and how they are sharded, and adapters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from drawloom import port
from drawloom.components.ports.model import BatchContext, Finish, LayerRange, Model, list_quantized_parameter_formats
from drawloom.components.ports.slices import ModelParameter, QuantizedParameter, RankSlice, TensorSlice
from drawloom.components.ports.weights import Mapper

Initial = Literal["normal"] | float | Callable[[Tensor], Tensor]
"""
Initial values: "normal" random numbers, a constant, or a function of uniform random numbers in [0, 1), of any shape.
"""


@attrs.frozen
class Scaling:
    """
    Factors of a parameter's initial standard deviation and of AdamW's options, by a model's parametrization.

    Decoupled weight decay is divided by `lr`, so that a step's decay stays the same. `width_ratio` is the factor
    between the sides of a matrix and of the base model's matrix.
    """

    initial_std: float = 1.0
    lr: float = 1.0
    eps: float = 1.0
    width_ratio: float = 1.0

    def fold_multiplier(self, multiplier: float) -> "Scaling":
        """
        Return the factors with which a parameter is `multiplier` times as large, at the start and after every step.

        Its gradient is 1 / `multiplier` times as large (Yang et al. 2022, arXiv 2203.03466, lemma J.1).
        """
        return Scaling(self.initial_std * multiplier, self.lr * multiplier, self.eps / multiplier, self.width_ratio)


UNSCALED = Scaling()


@attrs.frozen
class Role:
    """
    Role of a parameter.

    Weight decay and orthogonalization (Muon) apply to matrices only, whatever their number of dimensions. In a forward
    pass, a token is multiplied `products` times by the whole parameter: 0 times by an embedding table, and by stacked
    experts the share of experts that it visits. Outputs of a layer with `is_residual` are added to the residual stream;
    the standard deviation of its random initial values shrinks with the number of layers. `scaling` applies to random
    initial values and to the optimizer.
    """

    is_matrix: bool
    initial: Initial
    products: float = 0.0
    scaling: Scaling = UNSCALED
    is_residual: bool = False


MATRIX_ROLE = Role(True, "normal", 1.0)
RESIDUAL_ROLE = Role(True, "normal", 1.0, is_residual=True)
TABLE_ROLE = Role(True, "normal")
BIAS_ROLE = Role(False, 0.0)
RESIDUAL_BIAS_ROLE = Role(False, 0.0, is_residual=True)
SCALE_ROLE = Role(False, 1.0)


@runtime_checkable
class DeclaresRoles(Protocol):
    """A module that declares the roles of its own parameters."""

    def parameter_roles(self) -> Mapping[str, Role]:
        """Return the roles of the module's own parameters, by their names inside of the module."""


@runtime_checkable
class ScalesRoles(Protocol):
    """A module that scales the roles of its own and its submodules' parameters."""

    def role_with_scaling(self, name: str, role: Role) -> Role:
        """Return the scaled role of a parameter by its name inside of the module."""


def default_role(name: str, parameter: Tensor) -> Role:
    """Return the role of a parameter (any shape) that no module declares, from its name and number of dimensions."""
    if name.endswith("bias"):
        return BIAS_ROLE  # biases of stacked experts have two dimensions
    return MATRIX_ROLE if parameter.ndim >= 2 else SCALE_ROLE


def parameter_roles(module: nn.Module) -> Iterator[tuple[str, Role]]:
    """Yield the name and role of every parameter of a module and its submodules, scaled by the module itself."""
    for path, owner in module.named_modules():
        declared = owner.parameter_roles() if isinstance(owner, DeclaresRoles) else {}
        for leaf, parameter in owner.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            role = declared.get(leaf) or default_role(leaf, parameter)
            yield name, module.role_with_scaling(name, role) if isinstance(module, ScalesRoles) else role


@attrs.frozen
class ModelScaling:
    """
    Factors for a decoder of one size.

    `outer` scales the embedding and the last norm, and `head` the head. Inside of layers, `residual` and
    `residual_vector` scale the matrices and biases whose outputs are added to the residual stream, and `matrix` and
    `vector` all others. `residual_multiplier` scales these outputs, and `logit_multiplier` the head's.
    """

    outer: Scaling = UNSCALED
    head: Scaling = UNSCALED
    matrix: Scaling = UNSCALED
    residual: Scaling = UNSCALED
    vector: Scaling = UNSCALED
    residual_vector: Scaling = UNSCALED
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0

    def fold_multipliers(self) -> "ModelScaling":
        """Return factors for an equal model without multipliers of outputs: its weights are multiplied instead."""
        return attrs.evolve(
            self,
            head=self.head.fold_multiplier(self.logit_multiplier),
            residual=self.residual.fold_multiplier(self.residual_multiplier),
            residual_vector=self.residual_vector.fold_multiplier(self.residual_multiplier),
            residual_multiplier=1.0,
            logit_multiplier=1.0,
        )


@port
class Parametrization(Protocol):
    """Rule for scaling a decoder relative to a smaller base model, whose best settings it keeps."""

    def compute_scaling_for_size(self, hidden_size: int, num_hidden_layers: int) -> ModelScaling:
        """Return the factors for a decoder with this width and depth; all are 1 for the base model."""


@port
class Adapter(Protocol):
    """A component that adds parameters to a frozen model on the meta device, or unfreezes some (`ThawingAdapter`)."""

    @property
    def targets(self) -> Sequence[str]:
        """
        Name patterns for modules or parameters; a pattern without a match in the model is an error in the
        recipe.
        """

    def adapt_and_list_matched_targets(self, module: nn.Module) -> Collection[str]:
        """
        Adapt a span of the model in place, and return the patterns that match.

        Existing parameters keep their names; added parameters belong to an `AdaptedLayer`.
        """


@runtime_checkable
class ThawingAdapter(Protocol):
    """An adapter that trains the model's own weights, so no pass can compute the model without it."""

    thaws: ClassVar[bool]


def trains_base_weights(adapter: object) -> bool:
    """Return whether an adapter, an object or a class, trains the model's own weights."""
    return isinstance(adapter, ThawingAdapter) and adapter.thaws


@attrs.frozen
class LowRank:
    """
    Pair of low-rank factors, in the terms of PEFT's `adapter_config.json`.

    `target` names a module in transformers or, if `fused`, a parameter that stacks experts. `scale` multiplies the
    matrices' product.
    """

    target: str
    rank: int
    scale: float
    dropout: float = 0.0
    dora: bool = False
    fused: bool = False


Fill = Callable[[str, nn.Parameter, float], None]
"""Callback that fills the parameter of a name with normal numbers of a standard deviation."""


class AdaptedLayer(ABC):
    """
    A layer with an adapter: a module with the replaced layer's parameters and the adapter's.

    The methods get the layer's name in the model. If `active` is False, the layer computes like the layer it
    replaces.
    """

    active: bool = True

    @property
    @abstractmethod
    def adapter_parameter_names(self) -> list[str]:
        """The adapter's parameter names inside the layer."""

    @abstractmethod
    def initialize_adapter(self, name: str, fill: Fill) -> None:
        """
        Initialize the adapter's parameter `name` in place; the layer's other parameters are already initialized.
        """

    @abstractmethod
    def make_merge_mapper(self, name: str, unmerged_weight_name: str | None = None) -> Mapper:
        """
        Return the mapper from the layer's parameters to an equivalent layer without an adapter.

        A group's first input is the adapted parameter. With `unmerged_weight_name`, the first group also outputs this
        parameter under that name, without the adapter's change.
        """

    @abstractmethod
    def make_mapper_to_peft(self, name: str) -> Mapper:
        """
        Return the mapper from the adapter's parameters to the tensors in PEFT's `adapter_model.safetensors`, with an
        inverse.
        """

    @abstractmethod
    def list_low_rank_pairs(self, name: str) -> list[LowRank]:
        """Return the low-rank factor pairs in the adapter of the layer `name`."""


def find_adapted_layers(module: nn.Module) -> Iterator[tuple[str, AdaptedLayer]]:
    """Iterate over the layers with adapters, by name."""
    return ((name, part) for name, part in module.named_modules() if isinstance(part, AdaptedLayer))


def adapter_parameter_names(module: nn.Module) -> set[str]:
    """Return the names of all adapter parameters in a module."""
    return {f"{name}.{leaf}" for name, layer in find_adapted_layers(module) for leaf in layer.adapter_parameter_names}


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
    `masters` maps names to the master weights, if the module's parameters are casts; if parameters are gathered
    from `shards` on several ranks, `masters` has this rank's slices. `adapters` have been injected into the module;
    without adapters every parameter is trained, unless a transform froze it. `splits` has this rank's slices for
    parameters that ranks compute with in slices. `recompute` is the activation checkpointing policy for its
    `blocks`. `read_or_draw_frozen_values` reads the values of frozen parameters that the module stores in a
    quantized format.
    """

    index: int
    count: int
    span: LayerRange
    module: nn.Module
    masters: Mapping[str, nn.Parameter] = attrs.field(factory=dict)
    shards: Shards | None = None
    adapters: Sequence[Adapter] = ()
    splits: Mapping[str, RankSlice] = attrs.field(factory=dict)
    blocks: Sequence[nn.Module] = ()
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


class WeightCopies:
    """Weight copies for passes: in another dtype or memory, or gathered."""

    def before_passes(self, only_if_changed: bool = False) -> None:
        """Prepare weights for a step's passes; with `only_if_changed`, only if one may have changed."""

    def after_backward(self) -> None:
        """Pass on gradients after a step's backward passes; the optimizer changes weights next."""


@port
class Stages(Protocol):
    """This rank's stages, with parameters on its device."""

    @property
    def local(self) -> list[Stage]:
        """This rank's stages, in order."""

    @property
    def weight_copies(self) -> "Sequence[WeightCopies]":
        """Weight copies for passes; empty if passes compute with the optimizer's weights."""

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
