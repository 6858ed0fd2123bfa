"""Builds the stages that this rank owns, and gives their parameters memory and values."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.distributed.rank_errors import run_on_all
from drawloom.components.parallel.buckets import BUCKET_BYTES
from drawloom.components.parallel.data_replicate import ReplicatedStore
from drawloom.components.parallel.data_shard import ShardedModule, ShardedStore, shard
from drawloom.components.parallel.expert import share_experts
from drawloom.components.parallel.master_weights import ParameterStore, compute_dtype
from drawloom.components.parallel.pipeline import layer_ranges, partition_layers, with_ends_apart
from drawloom.components.parallel.row_sums import share_rows
from drawloom.components.parallel.sliced_store import SlicedStore
from drawloom.components.parallel.tensor import TensorRanks, split
from drawloom.components.pipeline.program.builders import stages_of
from drawloom.components.ports.adapters import Adapter
from drawloom.components.ports.distributed import DATA, EXPERT_REPLICAS, SHARDS, Device, Mesh, Precision
from drawloom.components.ports.experts import Dispatcher, supports_expert_parallel
from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.model import BatchContext, LayerRange, Model, layers_keep_shapes
from drawloom.components.ports.pipeline import (
    Loss,
    OuterLayersSchedule,
    PartitioningSchedule,
    Schedule,
    embeds_on_every_rank,
    module_of,
)
from drawloom.components.ports.run import RunInfo
from drawloom.components.ports.slices import RankSlice, TensorSlice
from drawloom.components.ports.stages import LOSS, Recompute, Stage, Transform
from drawloom.components.stages.activation_specs import ActivationSpecs
from drawloom.components.stages.checks import (
    NO_DISPATCHER,
    WRITE_DISPATCHER,
    costs_of_ends,
    fault_of_policy,
    gathers_by_block,
    layers_of_stages,
    losses_that_are_modules,
    misfits_of_capture,
    misfits_of_experts,
    misfits_of_shards,
    misfits_of_tensor,
    notes_of_policy,
    policies_of_schedule,
    roundings,
    shares_of_parameters,
)
from drawloom.components.stages.compilation import compile_blocks, idle_policies, undivided_backwards
from drawloom.components.stages.initial_values import InitialValues, check_capacity
from drawloom.components.stages.parameters import StageParameters
from drawloom.components.weights.adapted import adapted_model, inject
from drawloom.graph import Problem, UserError, above, at_least, component, setting
from drawloom.graph.wiring.node import NodeView
from drawloom.kernels.recompute_policy import make_recomputable

FROZEN = "frozen"
"""The entry of a state with the fingerprint of the weights that it leaves out; parameters' names have dots."""


@component
class MaterializedStages:
    """
    This rank's stages: built on the meta device, adapted and transformed, materialised, then initialised or loaded.

    With `adapters` the model is frozen but for what these train. A checkpoint holds what is trained; the rest is made
    again from the same folder or seed, of which it holds a fingerprint.
    """

    model: Model
    loss: Loss
    schedule: Schedule
    mesh: Mesh
    device: Device
    precision: Precision
    job: RunInfo
    adapters: list[Adapter] = attrs.field(factory=list)
    transforms: list[Transform] = attrs.field(factory=list)
    dispatcher: Dispatcher | None = None
    embedding_layer_cost: int = setting(
        default=0,
        check=at_least(0),
        impact="safe",
        doc="cost of the embedding in layers, of which the first stage holds fewer",
    )
    head_layer_cost: int = setting(
        default=0,
        check=at_least(0),
        impact="safe",
        doc="cost of the head in layers, of which the last stage holds fewer",
    )
    reshard_after_forward: bool | None = setting(
        default=None,
        impact="safe",
        doc="whether sharded parameters of a layer are freed after its forward and gathered again in its backward, "
        "which takes less memory and more time; if left out, with one pipeline rank",
    )
    sync_each_microbatch: bool = setting(
        default=False,
        impact="safe",
        doc="whether ranks of `mesh.data_shard` reduce gradients after each microbatch, so that none keeps those of "
        "whole parameters until the last one, which takes less memory and more messages",
    )
    bucket_bytes: int = setting(
        default=BUCKET_BYTES,
        impact="safe",
        check=above(0),
        doc="bytes of gradients that replicas sum in one collective, while the backward pass computes others",
    )
    recompute: Recompute = setting(
        default="none",
        impact="safe",
        check=fault_of_policy,
        doc="what the backward pass computes again instead of keeping it: 'none'; 'selective': norms, gates and "
        "rotations of the kernels; 'blocks': every block; a number n: one of n blocks",
    )
    compile: bool = setting(
        default=False,
        doc="whether each block is compiled by torch.compile; its weights' gradients can't be put off then",
    )
    capture: bool = setting(
        default=False,
        impact="safe",
        doc="whether a GPU gets the passes of a stage as CUDA graphs, which is faster where microbatches are small",
    )
    weights: Path | None = setting(
        default=None, doc="a Hugging Face folder to start from; that of `model.auto`, or random weights, if left out"
    )
    _values: InitialValues = attrs.field(init=False, default=None)
    local: list[Stage] = attrs.field(init=False, factory=list)  # this rank's stages, in order
    store: ParameterStore | ShardedStore = attrs.field(init=False, default=None)  # what holds the parameters
    _boundaries: ActivationSpecs = attrs.field(init=False, default=None)
    _parameters: StageParameters = attrs.field(init=False, default=None)
    # the slices that tensor and expert ranks have of parameters, which data ranks may slice again
    _splits: dict[str, RankSlice] = attrs.field(init=False, factory=dict)
    _of_experts: set[str] = attrs.field(init=False, factory=set)  # those of them that expert ranks have
    _fingerprint: str = attrs.field(init=False, default="")

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """What does not fit together: see checks.py and compilation.py."""
        for mesh, precision in zip(node.neighbours("mesh"), node.neighbours("precision"), strict=True):
            yield from misfits_of_shards(mesh, precision)
        for model, precision in product(node.neighbours("model"), node.neighbours("precision")):
            yield from roundings(node, model, precision)
        for mesh, model in zip(node.neighbours("mesh"), node.neighbours("model"), strict=True):
            yield from misfits_of_tensor(mesh, model)
            yield from misfits_of_experts(node, mesh, model)
        for loss in node.neighbours("loss"):
            yield from losses_that_are_modules(node, loss)
        for schedule, mesh in zip(node.neighbours("schedule"), node.neighbours("mesh"), strict=True):
            yield from undivided_backwards(node, schedule, mesh)
            yield from costs_of_ends(node, schedule)
            yield from policies_of_schedule(node, schedule, mesh)
        yield from idle_policies(node)
        yield from misfits_of_capture(node)

    @classmethod
    def notes(cls, node: NodeView) -> Iterator[str]:
        """How the ranks of the mesh share the parameters, and what is recomputed."""
        yield from notes_of_policy(node.settings["recompute"])
        if node.settings["capture"]:
            yield "capture: from the second step on a GPU gets each pass of a stage as a CUDA graph; a CPU has none"
        for mesh in node.neighbours("mesh"):
            yield from shares_of_parameters(node, mesh)
            for schedule, model in product(node.neighbours("schedule"), node.neighbours("model")):
                yield from layers_of_stages(schedule, mesh, model)

    def open(self) -> None:
        """Build this rank's modules, and initialise or load them."""
        if self.mesh.size("expert") > 1 and not supports_expert_parallel(self.dispatcher):
            raise UserError(f"{NO_DISPATCHER}; {WRITE_DISPATCHER}", exit_code=2)
        spans, modules = self._build_all()
        check_capacity(modules.values(), self.mesh.group(*SHARDS).size, self.device.device)
        self._boundaries = ActivationSpecs(spans, self._build_for_compute, self._layers_keep_shapes)
        sharded = self._shard(modules.values())
        places = {name: each.place for name, each in self._splits.items()}
        self._values = InitialValues(self.model, self.job.seed, self.device.device, self.weights, places)
        run_on_all(self.mesh.world, lambda: self._values.fill(modules.values()))
        if self.adapters:
            self._values.fill_adapters(modules.values())
        tie(list(modules.values()))
        self.store = self._take_over([*modules.values()], sharded)
        self._hold(spans, modules)
        for module in modules.values():
            if self.compile:
                compile_blocks(self.model.blocks(module))
            make_recomputable(self.model.blocks(module))
        self._parameters.open()
        self._fingerprint = self._values.origin(self._parameters.all().values())
        self._check_patterns()

    def outline(self) -> None:
        """Build this rank's modules on the meta device, as they compute but without memory and values: for plans."""
        spans, modules = self._build_all()
        tie(list(modules.values()))
        if (ranks := self.mesh.group(*SHARDS)).size > 1:
            by_block = gathers_by_block(self.reshard_after_forward, self.mesh.size("pipeline"))
            apart = frozenset(self._of_experts), self._shards_of_experts
            how = self.model.blocks, ranks, self.precision, by_block, *apart
            self.store = SlicedStore.sliced([*modules.values()], *how)
        else:
            self.store = ParameterStore.of(modules.values(), self.precision)
        self._hold(spans, modules)

    def _build_all(self) -> tuple[list[LayerRange], dict[int, nn.Module]]:
        """The spans of all stages, and this rank's modules on the meta device, by stage."""
        owners = self.schedule.stage_to_rank(self.mesh.size("pipeline"))
        spans, mine = self._split(len(owners)), stages_of(self.mesh.index("pipeline"), owners)
        if embeds_on_every_rank(self.schedule):
            spans = with_ends_apart(spans, self.model.num_hidden_layers)
            mine = [0, *(index + 1 for index in mine), len(spans) - 1]
        if self.adapters:
            adapted_model(self.model, self.adapters)  # a pattern may match nothing on this rank, but somewhere
        return spans, {index: self._build(spans[index]) for index in mine}

    def _hold(self, spans: Sequence[LayerRange], modules: Mapping[int, nn.Module]) -> None:
        """Make these modules, whose parameters the store has, this rank's stages."""
        of_all = self.adapters, self._splits, self.recompute, self.capture
        self.local = [
            Stage(
                index,
                len(spans),
                spans[index],
                module,
                self.store.masters,
                self.store.shards_of(module),
                *of_all,
            )
            for index, module in modules.items()
        ]
        how = self.mesh, self.precision, self.device.device, self.bucket_bytes, self._splits, self._of_experts
        self._parameters = StageParameters(self.local, self.store, *how)

    @property
    def _layers_keep_shapes(self) -> bool:
        """Whether every layer gives what it takes: the model says so, and nothing here makes layers different."""
        changed = bool(self.transforms or self.precision.uncast)
        return not changed and layers_keep_shapes(self.model)

    def boundary(self, stage: int, tokens: Tensor, shared: BatchContext) -> Any:
        """What a stage takes for a microbatch of tokens (rows, length): a tree of tensors on the meta device."""
        return self._boundaries.of(stage, tokens, shared)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters of all local stages, each once; none while these are not open."""
        return [] if self._parameters is None else self._parameters.named()

    def slices(self) -> dict[str, TensorSlice | None]:
        """Of each trained parameter, the slice that this rank has; None for a whole one."""
        return {name: self._parameters.slice(name) for name, _ in self.named()}

    def counted(self) -> list[tuple[str, nn.Parameter]]:
        """Those of `named` that no earlier rank holds, of those that are no replicas of this one."""
        return self._parameters.counted()

    def cast_weights(self, only_if_changed: bool = False) -> None:
        """Cast parameters to what layers compute with."""
        self.store.cast(only_if_changed)

    def hand_over_gradients(self) -> None:
        """Give the gradients of a step's microbatches to the parameters that the optimizer keeps."""
        self.store.hand_over_gradients()

    def memory_bytes(self) -> dict[MemoryKind, int]:
        """Bytes of parameters, buffers, masters and compute copies, and of the gradients that a step will have."""
        return self._parameters.memory_bytes() if self._parameters is not None else {}

    def sum_gradients(self) -> None:
        """Sum the gradients that backward passes have not summed; a pipeline rank without a parameter adds zeros."""
        self._parameters.sum_gradients()

    def state_slices(self) -> dict[str, TensorSlice | None]:
        """The trained parameters and persistent buffers that this rank holds, and of which it holds a slice."""
        return {name: self._parameters.slice(name) for name in self.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Every trained parameter and every persistent buffer by its name; a fingerprint of what is frozen."""
        state: dict[str, Any] = {
            name: tensor.detach() for held in self._parameters.changing() for name, tensor in held.items()
        }
        return state | ({FROZEN: self._fingerprint} if self._fingerprint else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy saved tensors into place."""
        if other := self.state_slices().keys() ^ state.keys():
            raise KeyError(f"parameters differ: {sorted(other)}")
        if state.get(FROZEN) != (self._fingerprint or None):
            raise UserError(self._values.other_origin())
        with torch.no_grad():
            # By stage, because two stages of this rank may each hold a buffer of one name.
            for held in self._parameters.changing():
                for name, tensor in held.items():
                    tensor.copy_(state[name])

    def _take_over(
        self, modules: Sequence[nn.Module], sharded: Sequence[ShardedModule]
    ) -> ParameterStore | ShardedStore:
        """The store of the parameters of modules, which are real."""
        if sharded:
            return ShardedStore.of(sharded, self.precision)
        # Hooks, by which replicas begin to sum before a backward pass ends, are not part of a graph.
        if (replicas := self.mesh.group(*DATA)).size > 1 and not self.capture:
            same = not self._of_experts or self.mesh.group(*EXPERT_REPLICAS).size == replicas.size
            apart = frozenset[str]() if same else self._of_experts
            how = self.model.blocks, self.precision, replicas, self.bucket_bytes, apart
            return ReplicatedStore.replicated(modules, *how)
        return ParameterStore.of(modules, self.precision)

    def _check_patterns(self) -> None:
        """UserError for a pattern of `precision.uncast` that is the name of no parameter on any rank."""
        patterns = self.precision.uncast
        names = [name for stage in self.local for name, _ in stage.module.named_parameters()]
        found = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]
        everywhere = {pattern for each in self.mesh.group("pipeline").gather_json(found) for pattern in each}
        if unknown := [pattern for pattern in patterns if pattern not in everywhere]:
            raise UserError(
                f"precision.uncast: no parameter is called {unknown[0]!r}; one is {names[0]!r}", exit_code=2
            )

    def _split(self, stages: int) -> list[LayerRange]:
        layers = self.model.num_hidden_layers
        if isinstance(self.schedule, PartitioningSchedule):
            sizes = [*self.schedule.layers_by_stage(self.mesh.size("pipeline"), layers)]
            if len(sizes) != stages or sum(sizes) != layers or min(sizes) < 1:
                text = f"layers_by_stage gives {sizes} for {layers} layers in {stages} stages"
                raise UserError(f"{type(self.schedule).__name__}.{text}; let each have some, and all {layers} together")
            return layer_ranges(sizes)
        try:
            if isinstance(self.schedule, OuterLayersSchedule):
                layers = self.schedule.layers_in_stages(self.mesh.size("pipeline"), layers)
            return partition_layers(layers, stages, self.embedding_layer_cost, self.head_layer_cost)
        except ValueError as error:
            raise UserError(f"{error}; take fewer stages", exit_code=2) from error

    def _build(self, span: LayerRange) -> nn.Module:
        with torch.device("meta"):
            module = self.model.build(span)
            inject(self.adapters, module)
        if span.head and (of_loss := module_of(self.loss)) is not None:
            module.add_module(LOSS, of_loss)
        for transform in self.transforms:
            module = transform.transform(module)
        refuse_shared(module)
        of_experts = share_experts(module, self.mesh.group("expert"), self.dispatcher)
        self._of_experts |= of_experts.keys()
        share_rows(module, self.mesh.group("context"))
        self._splits |= split(module, TensorRanks(self.mesh.group("tensor"))) | of_experts
        for name, parameter in module.named_parameters():  # buffers keep the dtype that their module chose
            if parameter.is_floating_point():
                # What is frozen is needed as layers compute with it alone, and so is read, and sharded, in that dtype.
                kept = self.precision.parameter if parameter.requires_grad else compute_dtype(name, self.precision)
                parameter.data = parameter.data.to(kept)
        return module

    def _build_for_compute(self, span: LayerRange) -> nn.Module:
        """The same in the dtypes in which layers compute, on the meta device: what its activations will look like."""
        module = self._build(span)
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(compute_dtype(name, self.precision))
        return module

    def _shard(self, modules: Iterable[nn.Module]) -> list[ShardedModule]:
        """Shard the parameters over the ranks of the mesh that do so; nothing without such ranks."""
        if self.mesh.group(*SHARDS).size == 1:
            return []
        by_block = gathers_by_block(self.reshard_after_forward, self.mesh.size("pipeline"))
        replicas = [("data_replicate",)] if self.mesh.size("data_replicate") > 1 else []
        mesh = self.mesh.torch_mesh(*replicas, SHARDS)
        of_experts = None
        if self._of_experts and self._shards_of_experts > 1:
            copies = [("expert_replicate",)] if self.mesh.size("expert_replicate") > 1 else []
            of_experts = self.mesh.torch_mesh(*copies, ("expert_shard",))
        when = by_block, self.sync_each_microbatch
        return shard(modules, self.model.blocks, mesh, self.precision, *when, self._of_experts, of_experts)

    @property
    def _shards_of_experts(self) -> int:
        """The number of ranks that have the same experts in one copy of the model."""
        return self.mesh.size("expert_shard") if self.mesh.size("expert") > 1 else 1


def refuse_shared(module: nn.Module) -> None:
    """UserError for a parameter of two modules: on the meta device it has no memory, and would get one for each."""
    owners: dict[nn.Parameter, str] = {}
    for path, part in module.named_modules():
        for leaf, parameter in part.named_parameters(prefix=path, recurse=False):
            if (first := owners.setdefault(parameter, leaf)) != leaf:
                text = f"{first} and {leaf} are one parameter of two modules, which would be two parameters in a run"
                raise UserError(f"{text}; let one module hold it, and both layers that module", exit_code=2)


def tie(modules: Sequence[nn.Module]) -> None:
    """Make parameters of one name, in modules of one rank, the same parameter."""
    first: dict[str, nn.Parameter] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, first.setdefault(name, parameter))
