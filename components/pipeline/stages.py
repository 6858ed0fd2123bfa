"""A model's blueprint made real: the stages that this rank owns, with their parameters."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.distributed.rank_errors import run_on_all
from drawloom.components.pipeline.module_buffers import fill_buffers
from drawloom.components.pipeline.program.builders import stages_of
from drawloom.components.pipeline.runtime.layer_partition import partition_layers
from drawloom.components.pipeline.runtime.p2p import ActivationSpecs
from drawloom.components.ports.distributed import Device, Mesh, Precision
from drawloom.components.ports.model import BatchContext, LayerRange, Model, Stage, Transform
from drawloom.components.ports.pipeline import Schedule
from drawloom.components.ports.run import RunInfo
from drawloom.components.weights.load import load_folder, persistent_tensors
from drawloom.graph import UserError, at_least, component, setting


@component
class MaterializedStages:
    """This rank's stages: built on the meta device, transformed, materialised, then initialised or loaded."""

    model: Model
    schedule: Schedule
    mesh: Mesh
    device: Device
    precision: Precision
    job: RunInfo
    transforms: list[Transform] = attrs.field(factory=list)
    embedding_layer_cost: int = setting(
        default=0, check=at_least(0), impact="safe", doc="layers that the first stage holds fewer of, for its embedding"
    )
    head_layer_cost: int = setting(
        default=0, check=at_least(0), impact="safe", doc="layers that the last stage holds fewer of, for its head"
    )
    weights: Path | None = setting(default=None, doc="a Hugging Face folder to start from; random weights if left out")
    _local: list[Stage] = attrs.field(init=False, factory=list)
    _boundaries: ActivationSpecs = attrs.field(init=False, default=None)
    _shared: dict[str, tuple[list[int], str]] = attrs.field(init=False, factory=dict)
    _elsewhere: set[str] = attrs.field(init=False, factory=set)

    def open(self) -> None:
        """Make the modules real."""
        owners = self.schedule.stage_to_rank(self.mesh.size("pipeline"))
        spans = self._split(len(owners))
        mine = stages_of(self.mesh.index("pipeline"), owners)
        self._boundaries = ActivationSpecs(spans, self._build)
        modules = {index: self._build(spans[index]) for index in mine}
        run_on_all(self.mesh.world, lambda: self._fill(modules.values()))
        tie(list(modules.values()))
        self._local = [Stage(index, len(spans), spans[index], module) for index, module in modules.items()]
        self._find_shared()

    @property
    def local(self) -> list[Stage]:
        """This rank's stages, in order."""
        return self._local

    def boundary(self, stage: int, tokens: Tensor, shared: BatchContext) -> Any:
        """The tree that a stage takes for a microbatch, its tensors on the meta device."""
        return self._boundaries.of(stage, tokens, shared)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters of all local stages that are trained, each once."""
        return [(name, parameter) for name, parameter in self._all().items() if parameter.requires_grad]

    def counted(self) -> list[tuple[str, nn.Parameter]]:
        """Those that no earlier pipeline rank holds as well."""
        return [(name, parameter) for name, parameter in self.named() if name not in self._elsewhere]

    def sum_shared(self) -> None:
        """Add up gradients of parameters that several pipeline ranks hold; a rank without one adds nothing."""
        mine = dict(self.named())
        for name, (shape, kind) in self._shared.items():
            parameter, dtype = mine.get(name), getattr(torch, kind)
            wide = torch.promote_types(dtype, self.precision.reduce)
            if parameter is None:
                self.mesh.group("pipeline").sum(torch.zeros(shape, dtype=wide, device=self.device.device))
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            total = parameter.grad.to(wide)
            self.mesh.group("pipeline").sum(total)
            parameter.grad.copy_(total)

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
            for held in self._held():  # two stages of this rank may hold a buffer each under one name
                for name, tensor in held.items():
                    tensor.copy_(state[name])

    def _find_shared(self) -> None:
        """Which parameters stand on several pipeline ranks: a tied embedding, on the first and the last."""
        group = self.mesh.group("pipeline")
        held = {name: ([*part.shape], str(part.dtype).removeprefix("torch.")) for name, part in self.named()}
        shapes: list[dict[str, tuple[list[int], str]]] = group.gather_json(held)
        times = Counter(name for names in shapes for name in names)
        everywhere = {name: form for names in shapes for name, form in names.items()}
        self._shared = {name: everywhere[name] for name in sorted(times) if times[name] > 1}
        self._elsewhere = {name for names in shapes[: group.rank] for name in names}

    def _all(self) -> dict[str, nn.Parameter]:
        return {name: parameter for stage in self._local for name, parameter in stage.module.named_parameters()}

    def _held(self) -> list[dict[str, Tensor]]:
        """What each local stage keeps from step to step."""
        return [persistent_tensors(stage.module) for stage in self._local]

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
        for transform in self.transforms:
            module = transform.transform(module)
        for parameter in module.parameters():  # buffers, such as frequencies, keep the dtype that their module chose
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.precision.parameter)
        return module

    def _fill(self, modules: Iterable[nn.Module]) -> None:
        """Make parameters and buffers real, with the numbers that the run starts from."""
        for module in modules:
            if self.weights is None:
                module.to_empty(device=self.device.device)
            fill_buffers(module, self.device.device, self.job.seed)
            if self.weights is not None:
                mapper = self.model.hugging_face_mapper().inverse()
                load_folder(self.weights, module, mapper, self.device.device)
                continue
            for name, parameter in module.named_parameters():
                self.model.initialise(name, parameter.data, self.job.seed)


def tie(modules: Sequence[nn.Module]) -> None:
    """Let parameters of one name, in modules that stand on one rank, be one parameter."""
    first: dict[str, nn.Parameter] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, first.setdefault(name, parameter))
