"""Builds the stages that this rank owns, and gives their parameters memory and values."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.distributed.rank_errors import run_on_all
from drawloom.components.pipeline.module_buffers import fill_buffers, fill_parameters
from drawloom.components.pipeline.parameter_store import ParameterStore, compute_dtype
from drawloom.components.pipeline.program.builders import stages_of
from drawloom.components.pipeline.runtime.layer_partition import partition_layers
from drawloom.components.pipeline.runtime.p2p import ActivationSpecs
from drawloom.components.ports.distributed import Device, Mesh, Precision
from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.model import LOSS, BatchContext, LayerRange, Model, Stage, Transform, gradient_of
from drawloom.components.ports.pipeline import Loss, Schedule
from drawloom.components.ports.run import RunInfo
from drawloom.components.weights.load import load_folder, persistent_tensors
from drawloom.graph import Problem, UserError, at_least, component, setting
from drawloom.graph.build.node import NodeView


@component
class MaterializedStages:
    """This rank's stages: built on the meta device, transformed, materialised, then initialised or loaded."""

    model: Model
    loss: Loss
    schedule: Schedule
    mesh: Mesh
    device: Device
    precision: Precision
    job: RunInfo
    transforms: list[Transform] = attrs.field(factory=list)
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
    weights: Path | None = setting(default=None, doc="a Hugging Face folder to start from; random weights if left out")
    _local: list[Stage] = attrs.field(init=False, factory=list)
    _store: ParameterStore = attrs.field(init=False, default=None)
    _boundaries: ActivationSpecs = attrs.field(init=False, default=None)
    _shared: dict[str, list[int]] = attrs.field(init=False, factory=dict)
    _on_earlier_ranks: set[str] = attrs.field(init=False, factory=set)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """The module of a loss belongs to the stages, so the loss itself can't be one."""
        for loss in node.neighbours("loss"):
            if issubclass(loss.component, nn.Module):
                where = f"under [{loss.name}] and [{node.name}]"
                text = f"{loss.use!r} is an nn.Module, which a checkpoint would save {where}"
                yield loss.problem("use", text, "let the component hold an nn.Module as its attribute `module`")

    def open(self) -> None:
        """Build this rank's modules, and initialise or load them."""
        owners = self.schedule.stage_to_rank(self.mesh.size("pipeline"))
        spans = self._split(len(owners))
        mine = stages_of(self.mesh.index("pipeline"), owners)
        self._boundaries = ActivationSpecs(spans, self._build_for_compute)
        modules = {index: self._build(spans[index]) for index in mine}
        run_on_all(self.mesh.world, lambda: self._fill(modules.values()))
        tie(list(modules.values()))
        self._store = ParameterStore.of(modules.values(), self.precision)
        self._local = [
            Stage(index, len(spans), spans[index], module, self._store.masters) for index, module in modules.items()
        ]
        self._check_patterns()
        self._find_shared()

    @property
    def local(self) -> list[Stage]:
        """This rank's stages, in order."""
        return self._local

    def boundary(self, stage: int, tokens: Tensor, shared: BatchContext) -> Any:
        """What a stage takes for a microbatch of tokens (rows, length): a tree of tensors on the meta device."""
        return self._boundaries.of(stage, tokens, shared)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters of all local stages, each once."""
        return [(name, parameter) for name, parameter in self._all().items() if parameter.requires_grad]

    def counted(self) -> list[tuple[str, nn.Parameter]]:
        """Those of `named` that no earlier pipeline rank holds."""
        return [(name, parameter) for name, parameter in self.named() if name not in self._on_earlier_ranks]

    def cast_weights(self, only_if_changed: bool = False) -> None:
        """Cast parameters to what layers compute with."""
        self._store.cast(only_if_changed)

    def hand_over_gradients(self) -> None:
        """Give the gradients of a step's microbatches to the parameters that the optimizer keeps."""
        self._store.hand_over_gradients()

    def memory_bytes(self) -> dict[MemoryKind, int]:
        """Bytes of parameters, buffers, masters and compute copies, and of the gradients that a step will have."""
        if not self._local:
            return {}
        stored = self._store.memory_bytes()
        modules = [stage.module for stage in self._local]
        tensors = dict.fromkeys(each for module in modules for each in chain(module.parameters(), module.buffers()))
        trained = sum(parameter.numel() for _, parameter in self.named())
        return {
            **stored,
            "parameters": sum(tensor.nbytes for tensor in tensors) - stored["compute_copies"],
            "gradients": trained * self.precision.gradient.itemsize,
        }

    def sum_shared(self) -> None:
        """Sum the gradients of parameters that several pipeline ranks hold; a rank without one adds zeros."""
        mine = dict(self.named())
        wide = torch.promote_types(self.precision.gradient, self.precision.reduce)
        for name, shape in self._shared.items():
            if (parameter := mine.get(name)) is None:
                # A collective of the whole group: ranks without the parameter take part with zeros.
                self.mesh.group("pipeline").sum(torch.zeros(shape, dtype=wide, device=self.device.device))
                continue
            gradient = gradient_of(parameter)
            total = gradient.to(wide)
            self.mesh.group("pipeline").sum(total)
            gradient.copy_(total)

    def state_names(self) -> list[str]:
        """The names of the parameters and persistent buffers that this rank holds."""
        return list(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Every parameter and every persistent buffer by its name."""
        return {name: tensor.detach() for held in self._held() for name, tensor in held.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy saved tensors into place."""
        if other := set(self.state_names()) ^ state.keys():
            raise KeyError(f"parameters differ: {sorted(other)}")
        with torch.no_grad():
            # By stage, because two stages of this rank may each hold a buffer of one name.
            for held in self._held():
                for name, tensor in held.items():
                    tensor.copy_(state[name])

    def _find_shared(self) -> None:
        """Find the parameters that several pipeline ranks hold: a tied embedding is on the first and on the last."""
        group = self.mesh.group("pipeline")
        shapes: list[dict[str, list[int]]] = group.gather_json({name: [*part.shape] for name, part in self.named()})
        times = Counter(name for names in shapes for name in names)
        everywhere = {name: shape for names in shapes for name, shape in names.items()}
        self._shared = {name: everywhere[name] for name in sorted(times) if times[name] > 1}
        self._on_earlier_ranks = {name for names in shapes[: group.rank] for name in names}

    def _all(self) -> dict[str, nn.Parameter]:
        return {name: parameter for stage in self._local for name, parameter in stage.named_parameters()}

    def _held(self) -> list[dict[str, Tensor]]:
        """What each local stage keeps from step to step."""
        return [{**persistent_tensors(stage.module), **dict(stage.named_parameters())} for stage in self._local]

    def _check_patterns(self) -> None:
        """UserError for a pattern of `precision.uncast` that is the name of no parameter on any rank."""
        patterns = self.precision.uncast
        names = [name for stage in self._local for name, _ in stage.module.named_parameters()]
        found = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]
        everywhere = {pattern for each in self.mesh.group("pipeline").gather_json(found) for pattern in each}
        if unknown := [pattern for pattern in patterns if pattern not in everywhere]:
            raise UserError(
                f"precision.uncast: no parameter is called {unknown[0]!r}; one is {names[0]!r}", exit_code=2
            )

    def _split(self, stages: int) -> list[LayerRange]:
        try:
            return partition_layers(
                self.model.num_hidden_layers, stages, self.embedding_layer_cost, self.head_layer_cost
            )
        except ValueError as error:
            raise UserError(f"{error}; take fewer stages", exit_code=2) from error

    def _build(self, span: LayerRange) -> nn.Module:
        with torch.device("meta"):
            module = self.model.build(span)
        if span.head and (of_loss := getattr(self.loss, "module", None)) is not None:
            module.add_module(LOSS, of_loss)
        for transform in self.transforms:
            module = transform.transform(module)
        for parameter in module.parameters():  # buffers, such as frequencies, keep the dtype that their module chose
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.precision.parameter)
        return module

    def _build_for_compute(self, span: LayerRange) -> nn.Module:
        """The same in the dtypes in which layers compute, on the meta device: what its activations will look like."""
        module = self._build(span)
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(compute_dtype(name, self.precision))
        return module

    def _fill(self, modules: Iterable[nn.Module]) -> None:
        """Give parameters and buffers memory, and the values that the run starts from."""
        device, seed = self.device.device, self.job.seed
        for module in modules:
            # Weights of a folder make parameters real one by one, without a second copy of the model.
            if self.weights is None:
                module.to_empty(device=device)
            fill_buffers(module, device, seed)
            if (of_loss := getattr(module, LOSS, None)) is not None:
                fill_parameters(LOSS, of_loss, device, seed)
            if self.weights is not None:
                try:
                    load_folder(self.weights, module, self.model.hugging_face_mapper().inverse(), device)
                except UserError as error:
                    raise UserError(f"weights: {error}", error.exit_code) from error
                continue
            for name, parameter in module.named_parameters():
                if not name.startswith(f"{LOSS}."):
                    self.model.initialise(name, parameter.data, seed)


def tie(modules: Sequence[nn.Module]) -> None:
    """Make parameters of one name, in modules of one rank, the same parameter."""
    first: dict[str, nn.Parameter] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, first.setdefault(name, parameter))
