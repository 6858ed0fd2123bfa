"""Ports for features composed around a rank's stages, such as compilation, and for users of memory."""

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from enum import IntEnum
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import attrs
from torch import Tensor, nn

from drawloom import NodeView, Problem, port
from drawloom.components.ports.distributed import PerDimension, Precision
from drawloom.components.ports.model import build_meta_module_if_known
from drawloom.components.ports.slices import RankSlice
from drawloom.components.ports.stages import FrozenModel, Recompute, WeightCopies

MemoryKind = Literal["parameters", "masters", "compute_copies", "gradients", "optimizer_state", "workspace"]
"""
The use of bytes. `parameters` are buffers and parameters that are both master weight and compute copy; `workspace` is
the part of a peak beyond all other kinds: activations, temporary tensors, and on a CPU the process itself.
"""

MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


@port
class MemoryUser(Protocol):
    """A node that keeps gradients, or tensors for longer than a step, on this rank's device."""

    def device_bytes(self) -> Mapping[MemoryKind, int]:
        """
        Return this node's bytes on this rank by kind, including bytes allocated in the first step; {} before `open`.

        An optimizer answers before `open`: its bytes follow from the parameters, which may be on the meta device.
        """


@runtime_checkable
class HostMemoryUser(Protocol):
    """A memory user with tensors in host memory, which are streamed to the device and back in every step."""

    def host_bytes(self) -> int:
        """Return the bytes in host memory on this rank; like `device_bytes`, before `open`."""


def sum_memory_by_kind(users: Iterable[MemoryUser], peak: int | None = None) -> dict[MemoryKind, int]:
    """Sum all users' bytes by kind, without empty kinds; with a peak, `workspace` is the remainder."""
    bytes_by_user = [user.device_bytes() for user in users]
    totals = {kind: sum(by_kind.get(kind, 0) for by_kind in bytes_by_user) for kind in MEMORY_KINDS}
    if peak is not None:
        totals["workspace"] += max(0, peak - sum(totals.values()))
    return {kind: size for kind, size in totals.items() if size}


Ticket = Any
"""A point in a stream of copies or computation, from `Transfers`; None is the past."""

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of a target and a source of equal shape and dtype."""


class Transfers(Protocol):
    """
    Asynchronous copies between a device and host memory (offload).

    Copies in one direction are made in order, each after the tickets in `after`. Neither the host nor the device's
    computation waits for a copy, except in `make_computation_wait` and `synchronize`; memory may be reused only after
    its copies.
    """

    def allocate_pinned_host_memory(self, size: int) -> Tensor:
        """Return zeros in host memory, uint8 (size,), which is pinned if the device is a GPU."""

    def copy_to_device(self, copies: Copies, after: Sequence[Ticket] = ()) -> Ticket:
        """Copy tensors from host memory to the device, and return the ticket of the last copy's end."""

    def copy_to_host(self, copies: Copies, after: Sequence[Ticket] = ()) -> Ticket:
        """Copy tensors from the device to host memory, and return the ticket of the last copy's end."""

    def mark_computation(self) -> Ticket:
        """Return a ticket that copies can wait for: all computation issued so far is done."""

    def make_computation_wait(self, ticket: Ticket) -> None:
        """Make computation issued from now on wait for a ticket; the host does not wait."""

    def synchronize(self) -> None:
        """Let the host wait for all copies."""

    def close(self) -> None:
        """Wait for all copies, and release the memory."""


@attrs.frozen
class MemoryChoice:
    """
    A run's memory use: recompute policies by stage (activation checkpointing), the stages whose activations wait in
    host memory, and by pipeline rank the fraction of the optimizer's state in host memory, from 0 to 1.
    """

    recompute: tuple[Recompute, ...]
    offloaded: frozenset[int]
    host_states: tuple[float, ...]

    @classmethod
    def keep_all(cls, stages: int, ranks: int) -> "MemoryChoice":
        """Return the choice to keep everything on the device, for these numbers of stages and pipeline ranks."""
        nothing: Recompute = "none"
        return cls((nothing,) * stages, frozenset(), (0.0,) * ranks)


@port
class MemoryPolicy(Protocol):
    """Chooses what a run keeps on the device, in place of settings."""

    def choose(self) -> MemoryChoice:
        """
        Return the choice for this run, before stages allocate. Ranks may choose differently: results do not change,
        unless the recompute policy is "quantized".

        Raises UserError if the run can't be planned.
        """


class WrappingOrder(IntEnum):
    """Position of a feature around the stages, from the inside to the outside."""

    LAYERS = 0
    """Replaces layers of the model."""
    STORAGE = 1
    """Stores weights in another format."""
    PLACEMENT = 2
    """Keeps weights in another memory."""
    PRODUCTS = 3
    """Multiplies by the weights in another way."""
    COMPILATION = 4
    """Compiles the layers."""
    LAUNCH = 5
    """Launches the passes in another way."""


@attrs.frozen(kw_only=True)
class StageNodes:
    """A recipe's nodes that determine parallelism. A missing edge is reported elsewhere."""

    stages: NodeView
    mesh: NodeView
    model: NodeView | None
    precision: NodeView | None

    @property
    def sizes(self) -> PerDimension:
        """The rank count by dimension, as written in the recipe."""
        return PerDimension.from_settings(self.mesh.settings)

    @property
    def features(self) -> list[NodeView]:
        """The stages' features."""
        return self.stages.neighbours("features")

    @staticmethod
    def component_of(feature: NodeView) -> "type[StageFeature]":
        """Return a feature's class."""
        return feature.component

    def find_feature(self, use: str) -> NodeView | None:
        """Return the feature with this `use`, if the stages have it."""
        return next((feature for feature in self.features if feature.use == use), None)

    @property
    def compute_dtype(self) -> str | None:
        """The name of the dtype in which layers compute; None without a precision."""
        settings = {} if self.precision is None else self.precision.settings
        return settings.get("compute") or settings.get("parameter")

    def build_precision(self) -> Precision | None:
        """Build the precision; None if there is none, or if it has problems."""
        with suppress(ValueError):
            return None if self.precision is None else self.precision.component(**self.precision.settings)
        return None

    def build_whole_model_on_meta(self) -> nn.Module | None:
        """Build the whole model on the meta device; None if it is unknown before a run."""
        return None if self.model is None else build_meta_module_if_known(self.model)

    @property
    def freezes_weights(self) -> bool:
        """Whether some weights may be frozen: by adapters, by a feature that replaces layers, or with the model."""
        orders = [self.component_of(feature).order for feature in self.features]
        has_adapters = bool(self.stages.neighbours("adapters"))
        return has_adapters or WrappingOrder.LAYERS in orders or self.stages.implements(FrozenModel)

    def check_run_ends_with_losses(self, feature: NodeView, text: str) -> Iterator[Problem]:
        """Yield a problem with `text` if the run continues when it loses processes."""
        processes = self.mesh.neighbour("processes")
        if processes and processes.settings.get("on_failure") == "continue":
            yield processes.problem("on_failure", text, f'write "stop", or remove [{feature.name}]')

    def check_some_weights_are_frozen(self, feature: NodeView) -> Iterator[Problem]:
        """Yield a problem for a feature that needs frozen weights if no weight is frozen."""
        if not self.freezes_weights:
            text = f"no weight is frozen, since [{self.stages.name}] has no adapters"
            hint = f"write adapters, as the recipe finetune_lora does, or remove [{feature.name}]"
            yield feature.problem("use", text, hint)


def put_class_before(module: Any, before: type) -> None:
    """Let a module use a class's methods before its own class's; the name of its class, and parameters, stay."""
    module.__class__ = combine_classes(before, module.__class__)


def put_class_back(module: Any) -> None:
    """Undo the last `put_class_before`."""
    module.__class__ = module.class_behind


@cache
def combine_classes(before: Any, behind: Any) -> Any:
    """Return the class for modules after `put_class_before`."""
    return type(behind.__name__, (before, behind), {"class_behind": behind})


class Feature:
    """Declarations shared by all features."""

    order: ClassVar[WrappingOrder]
    excludes: ClassVar[Mapping[str, str]] = {}
    """Components that can't be in a recipe with the feature, by the name after `use`, and why."""


def check_exclusions(feature: NodeView) -> Iterator[Problem]:
    """Yield problems with nodes that a feature excludes."""
    excluded: Mapping[str, str] = feature.component.excludes  # type: ignore[attr-defined]
    for node in feature.nodes.values():
        if reason := excluded.get(node.spec.use):
            text = f"[{feature.name}] and [{node.name}] exclude each other: {reason}"
            yield feature.problem("use", text, f"remove [{feature.name}] or [{node.name}]")


@attrs.frozen
class NamePatterns:
    """A component's setting with patterns (fnmatch); each pattern has to match a name in `names`."""

    component: str
    setting: str
    kind: str
    patterns: Sequence[str]
    names: Sequence[str]

    def matches(self, pattern: str) -> bool:
        """Return whether a pattern matches a name."""
        return any(fnmatchcase(name, pattern) for name in self.names)

    def describe_fault(self, pattern: str) -> str:
        """Return the message for a pattern that matches no name."""
        example = f"; one is {self.names[0]!r}" if self.names else ""
        return f"no {self.kind} is called {pattern!r}{example}"

    def check(self, node: NodeView) -> Iterator[Problem]:
        """Yield problems of a component's node, if names are known."""
        for number, pattern in enumerate(self.patterns if self.names else ()):
            if not self.matches(pattern):
                hint = self._suggest_pattern(pattern)
                yield node.problem((self.setting, number), self.describe_fault(pattern), hint)

    def _suggest_pattern(self, pattern: str) -> str:
        """Return a hint with the pattern of the most similar parts of names, if it matches."""
        from drawloom.graph.spelling import find_nearest

        known = {part for name in self.names for part in name.split(".")}
        near = re.sub(r"[^.*?]+", lambda part: find_nearest(part[0], known) or part[0], pattern)
        return f"did you mean {near!r}?" if self.matches(near) else "write another pattern, or remove it"


@port
class StageFeature(Feature, WeightCopies):
    """
    A feature composed around a rank's stages. Derive from this class: its members do nothing.

    Stages call the features of a recipe in the order of `order`, from the inside to the outside, and of equal ones in
    the recipe's order. The stages, the model and the executor know no feature; without its node, nothing of it is
    imported.
    """

    order: ClassVar[WrappingOrder] = WrappingOrder.LAYERS
    keeps_layer_shapes: ClassVar[bool] = False
    """Whether all layers keep the shape and dtype of hidden states if the model's layers do."""
    fuses_backward: ClassVar[bool] = False
    """Whether weight gradients are computed together with input gradients, so that no schedule can delay them."""
    peak_factor: ClassVar[float] = 1.0
    """The most that a device's products are faster than in the compute dtype."""

    @classmethod
    def check_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[Problem]:
        """Yield problems of a recipe whose stages can't have the feature."""
        yield from ()

    @classmethod
    def describe_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[str]:
        """Yield sentences for `explain` about the feature's effect on the stages."""
        yield from ()

    def transform(self, module: nn.Module) -> nn.Module:
        """Return the replacement for a stage's module on the meta device, not yet split over ranks."""
        return module

    def convert(self, module: nn.Module, precision: Precision, splits: MutableMapping[str, RankSlice]) -> None:
        """
        Change a stage's module on the meta device, split over ranks and in its dtypes.

        `splits` are this rank's slices by parameter name. Names of parameters stay, because checkpoints have them.
        Raises UserError for a module that the feature does not support.
        """

    def name_patterns(self, modules: Sequence[nn.Module]) -> Iterator[NamePatterns]:
        """Yield settings with patterns; every pattern has to match a name in some rank's modules."""
        yield from ()

    def change_initial_values(self, values: Any) -> Any:
        """Return the initializer for modules: the stages' one, or another one in its place."""
        return values

    def place(self, modules: Sequence[nn.Module]) -> None:
        """Place parameters on the meta device in another memory, before all others get the device's memory."""

    def place_on_meta(self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        """Do for a plan, which has no memory, as `place` and `finish` do for a run."""

    def finish(self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        """Change modules with memory and values; `blocks` are their layers."""

    def change_shards(self, shards: Sequence[Any]) -> None:
        """Change FSDP's modules, with memory and values; without shards there are none."""

    def allocate(self, modules: Sequence[nn.Module]) -> None:
        """Allocate the feature's own memory, also on the meta device for a plan."""

    def change_device_bytes(self, sizes: MutableMapping[MemoryKind, int]) -> None:
        """Change the stages' bytes on the device."""

    def count_host_bytes(self) -> int:
        """Return the bytes of weights in host memory."""
        return 0

    def describe_model(self, whole: nn.Module, precision: Precision) -> Iterator[str]:
        """
        Yield phrases for the run's summary about a whole model on the meta device.

        Features further outside see the module afterwards, so it may be changed.
        """
        yield from ()
