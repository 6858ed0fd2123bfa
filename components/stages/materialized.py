"""This rank's stages: their modules, their parameters' memory and values, and their state."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from drawloom import NodeView, Problem, UserError, above, at_least, component, internal, setting, wired
from drawloom.components.parallel.dimensions import DIMENSIONS
from drawloom.components.stages.checks import (
    check_adapter_folder,
    check_adapter_weights_have_adapters,
    check_features,
    check_initial_folder,
    check_layer_costs_are_used,
    check_loss_is_not_module,
    check_memory_policy,
    check_recompute_is_set_once,
    describe_recompute_fault,
    find_stage_nodes,
    warn_fused_split_backward,
    warn_narrowed_weights,
)
from drawloom.ports import (
    Adapter,
    BatchContext,
    Device,
    Dispatcher,
    Loss,
    MemoryKind,
    MemoryPolicy,
    Mesh,
    Model,
    NodeState,
    Precision,
    Recompute,
    Role,
    RunInfo,
    Schedule,
    Stage,
    StageFeature,
    TensorSlice,
    WeightCopies,
)

if TYPE_CHECKING:
    from drawloom.components.parallel.fsdp import ShardedStore
    from drawloom.components.parallel.master_weights import ParameterStore
    from drawloom.components.stages.assembly import StageAssembly, StageBuilder


FROZEN = "frozen"
"""
The entry of a state with the fingerprint of frozen weights, which the state omits. Names of parameters contain dots.
"""


@component(
    replaced_keys={
        "capture": 'a table [capture] with use = "pipeline.captured"',
        "compile": 'a table [compile] with use = "stages.compiled"',
        "offload": 'a table [offload] with use = "pipeline.offloaded"',
        "stream_frozen": 'a table [streamed] with use = "frozen_weights.streamed"',
        "transforms": 'features = ["@name"], or a table with a feature, which is found by type',
    }
)
class MaterializedStages:
    """
    This rank's stages: built on the meta device, adapted, transformed, materialized, and then initialized or loaded.

    With `adapters`, only the adapters' parameters are trained. A checkpoint has the trained parameters and a
    fingerprint of the frozen ones, which a resumed run recreates from the same folder or seed.
    """

    model: Model
    loss: Loss
    schedule: Schedule
    mesh: Mesh
    device: Device
    precision: Precision
    job: RunInfo
    adapters: list[Adapter] = attrs.field(factory=list)
    features: list[StageFeature] = wired(factory=list)
    dispatcher: Dispatcher | None = wired(default=None)
    memory: MemoryPolicy | None = None
    embedding_layer_cost: int = setting(
        "embedding cost in layers; the first stage gets fewer layers by this number",
        default=0,
        check=at_least(0),
        impact="safe",
    )
    head_layer_cost: int = setting(
        "head cost in layers; the last stage gets fewer layers by this number",
        default=0,
        check=at_least(0),
        impact="safe",
    )
    reshard_after_forward: bool | None = setting(
        "whether FSDP frees a layer's gathered parameters after its forward and gathers them again in its "
        "backward: less memory, more communication; default: true with one pipeline rank",
        default=None,
        impact="safe",
    )
    sync_each_microbatch: bool = setting(
        "whether FSDP ranks reduce gradients after every microbatch instead of after gradient accumulation: "
        "less memory, more communication",
        default=False,
        impact="safe",
    )
    bucket_bytes: int = setting(
        "bytes per DDP gradient bucket, which replicas sum in one collective during the backward pass",
        default=32 * 2**20,
        impact="safe",
        check=above(0),
    )
    recompute: Recompute = setting(
        "activation checkpointing policy; 'none'; 'selective': norms, gates and rotations; 'blocks': every "
        "block; a number n: one block in n; 'quantized': 'selective' with inputs of norms and gates in 8 bits, "
        "which rounds gradients",
        default="none",
        impact="safe",
        check=describe_recompute_fault,
    )
    weights: Path | None = setting(
        "Hugging Face folder with initial weights; default: `model.auto`'s folder, or random weights", default=None
    )
    adapter_weights: Path | None = setting(
        "folder of a run's adapter, or one of PEFT, with the adapters' initial values; default: random values",
        default=None,
    )
    local: list[Stage] = internal(factory=list)  # this rank's stages, in order
    weight_copies: list[WeightCopies] = internal(factory=list)
    store: "ParameterStore | ShardedStore" = internal(None)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield conflicts between settings: see checks.py, compilation.py, and each mesh dimension's `check`."""
        if nodes := find_stage_nodes(node):
            for dimension in DIMENSIONS:
                yield from dimension.check(nodes)
            if schedule := node.neighbour("schedule"):
                yield from warn_fused_split_backward(node, schedule, nodes.mesh)
                yield from check_recompute_is_set_once(node, schedule, nodes.mesh)
            yield from check_features(nodes)
        yield from warn_narrowed_weights(node)
        yield from check_adapter_weights_have_adapters(node)
        if loss := node.neighbour("loss"):
            yield from check_loss_is_not_module(node, loss)
        if schedule := node.neighbour("schedule"):
            yield from check_layer_costs_are_used(node, schedule)
            yield from check_memory_policy(node, schedule)

    @classmethod
    def resume_impact(cls, node: NodeView, key: str, before: Any) -> tuple[str, str] | None:
        """Return changes_training if `recompute` begins or ceases to round gradients."""
        changes = key == "recompute" and "quantized" in (before, node.settings["recompute"])
        return ("changes_training", "'quantized' rounds gradients") if changes else None

    @classmethod
    def notes(cls, node: NodeView) -> Iterator[str]:
        """Yield sentences for `explain`: recomputation, features, formats, mesh dimensions and layers."""
        from drawloom.components.stages.notes import describe_stages

        yield from describe_stages(node)

    def check_before_open(self) -> None:
        """
        Raise UserError if `weights` is not a folder of readable safetensors files, its head is of another kind,
        adapters match nothing, or `adapter_weights` do not fit them.
        """
        if self.adapters:
            from drawloom.components.weights.adapted import build_meta_model_with_adapters

            build_meta_model_with_adapters(self.model, self.adapters)
        check_initial_folder(self.weights, self.model, self.loss)
        if self.adapter_weights is not None:
            check_adapter_folder(self.adapter_weights, self.model, self.adapters, self.weights)

    def open(self) -> None:
        """Build, parallelize and materialize this rank's stages, with initial or loaded values."""
        self._assembly.materialize()
        self.local, self.store = self._assembly.local, self._assembly.store
        self.weight_copies = self._assembly.list_weight_copies()

    def build_meta_stages(self) -> None:
        """Build and parallelize this rank's stages without memory and values, for plans."""
        self._assembly.build_on_meta()
        self.local, self.store = self._assembly.local, self._assembly.store

    @cached_property
    def _assembly(self) -> "StageAssembly":
        """The assembly of stages, which a check of the recipe does not import."""
        from drawloom.components.stages.assembly import StageAssembly

        return StageAssembly(self)

    @property
    def builder(self) -> "StageBuilder":
        return self._assembly.builder

    def infer_stage_inputs(self, stage: int, inputs: Any, shared: BatchContext) -> Any:
        return self._assembly.activations.infer_stage_inputs(stage, inputs, shared)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all local stages' trained parameters, without duplicates; [] before `open`."""
        return [*self._assembly.parameters.named.items()] if self._assembly.parameters else []

    def parameter_slices(self) -> dict[str, TensorSlice | None]:
        return {name: self._assembly.parameters.get_rank_slice(name) for name, _ in self.named_parameters()}

    @property
    def initial_folder(self) -> Path | None:
        return self._assembly.values.folder if self._assembly.values else None

    def roles(self) -> dict[str, Role]:
        return self._assembly.parameters.roles()

    def owned_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self._assembly.parameters.owned_parameters()

    def device_bytes(self) -> dict[MemoryKind, int]:
        """
        Return the bytes in parameters, buffers, masters and compute copies, and in a step's gradients; {} before
        `open`.
        """
        if self._assembly.parameters is None:
            return {}
        sizes = self._assembly.parameters.device_bytes()
        self._assembly.features.change_device_bytes(sizes)
        return sizes

    @property
    def feature_host_bytes(self) -> int:
        """Bytes of weights in host memory."""
        return self._assembly.features.count_host_bytes()

    def sum_remaining_gradients(self) -> None:
        """Sum the gradients not summed in backward passes; a pipeline rank without a parameter adds zeros."""
        self._assembly.parameters.sum_remaining_gradients()

    def state_slices(self) -> dict[str, TensorSlice | None]:
        """Return this rank's slices by name, for trained parameters and persistent buffers; None for whole ones."""
        return {name: self._assembly.parameters.get_rank_slice(name) for name in self.state_dict()}

    def state_dict(self) -> NodeState:
        """Return trained parameters and persistent buffers by name, and a fingerprint for frozen parameters."""
        state: NodeState = {}
        for stage, trained in zip(self.local, self._assembly.parameters.trained_by_stage, strict=True):
            tensors = {**trained, **stage.persistent_buffers()}
            state |= {name: tensor.detach() for name, tensor in tensors.items()}
        return state | ({FROZEN: self._assembly.fingerprint} if self._assembly.fingerprint else {})

    def load_state_dict(self, state: NodeState) -> None:
        """Copy saved tensors into place. Raises KeyError for other names, and UserError for other frozen parameters."""
        if other := self.state_slices().keys() ^ state.keys():
            raise KeyError(
                f"the checkpoint and the stages have different parameters and buffers; only one has {sorted(other)}"
            )
        if state.get(FROZEN) != (self._assembly.fingerprint or None):
            raise UserError(self._assembly.values.format_changed_source_error())
        with torch.no_grad():
            # By stage, because two stages of this rank may have buffers with the same name.
            for stage, trained in zip(self.local, self._assembly.parameters.trained_by_stage, strict=True):
                for name, tensor in {**trained, **stage.persistent_buffers()}.items():
                    tensor.copy_(state[name])

    def describe_features(self, whole: nn.Module) -> Iterator[str]:
        from drawloom.components.parallel.split_experts import set_dispatcher

        yield from self._assembly.features.describe_model(whole, self._assembly.precision)
        set_dispatcher(whole, self.dispatcher)
        for dimension in DIMENSIONS:
            yield from dimension(self.mesh).describe(whole)
