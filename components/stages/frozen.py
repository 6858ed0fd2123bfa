"""A frozen second model, with stages on the same ranks as the trained one: a teacher, or a reference model."""

import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from torch import nn

from drawloom.components.parallel.dimensions import DIMENSIONS
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.distributed import Device, Mesh, Precision
from drawloom.components.ports.experts import Dispatcher
from drawloom.components.ports.features import StageFeature
from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.model import BatchContext, Finish, LayerRange, Model, PretrainedModel
from drawloom.components.ports.pipeline import Schedule
from drawloom.components.ports.run import RunInfo
from drawloom.components.ports.stages import ForwardStages
from drawloom.components.stages.checks import check_initial_folder, find_stage_nodes
from drawloom.components.stages.feature_stack import FeatureStack, check_features, describe_features
from drawloom.components.stages.materialized import FROZEN, MaterializedStages
from drawloom.components.weights.token_ids import compare_folder_ids
from drawloom.graph import Problem, UserError, component, setting, wired
from drawloom.graph.wiring.node import NodeView

log = logging.getLogger("drawloom.run")


@component
class FrozenStages:
    """
    A frozen second model: a teacher, or a reference model.

    Its layers are partitioned over the ranks like those of the trained model: into as many pipeline stages, over the
    same tensor-parallel ranks, and with FSDP, which gathers them layer by layer. Weights have the dtype for products,
    or the format of a feature of its own, such as `features = [{ use = "frozen_weights.quantized" }]`. Checkpoints
    contain a fingerprint of the folder, and no weights.

    Its folder must have the data's token ids in its `tokenizer.json`, and may have more of them.
    """

    model: Model
    schedule: Schedule
    mesh: Mesh
    device: Device
    precision: Precision
    job: RunInfo
    tokenizer: Tokenizer | None = wired(default=None)
    dispatcher: Dispatcher | None = None
    features: list[StageFeature] = attrs.field(factory=list)
    weights: Path | None = setting(
        default=None, doc="Hugging Face folder with the weights; default: the folder of `model.auto`"
    )
    _stages: MaterializedStages = attrs.field(init=False, default=None)
    _fingerprint: str = attrs.field(init=False, default="")

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report a model with random weights, and one that the mesh can't divide."""
        model = node.neighbour("model")
        has_folder = model and model.implements(PretrainedModel) and model.settings.get("weights", True)
        if model and not has_folder and node.settings["weights"] is None:
            text = f"[{node.name}] would have random weights, from which there is nothing to learn"
            yield node.problem("weights", text, 'write weights = "folder", or use = "model.auto" in the model')
        if nodes := find_stage_nodes(node):
            for dimension in DIMENSIONS:
                if dimension.splits_work:
                    yield from dimension.check(nodes)
            yield from check_features(nodes)

    @classmethod
    def notes(cls, node: NodeView) -> Iterator[str]:
        """Yield the features' sentences for `explain`."""
        if nodes := find_stage_nodes(node):
            yield from describe_features(nodes)

    def check_before_open(self) -> None:
        """
        Raise UserError if `weights` is not a folder of readable safetensors files, has no head, or differs in token ids
        from the data.
        """
        check_initial_folder(self.weights, self.model, None)
        self._compare_token_ids()

    def _compare_token_ids(self) -> str | None:
        """Return a warning about the folder's token ids, or None. Raises UserError for ids of another tokenizer."""
        own = self.model.initial_weights if isinstance(self.model, PretrainedModel) else None
        folder = self.weights or own
        return compare_folder_ids(folder, self.tokenizer) if folder and self.tokenizer else None

    def open(self) -> None:
        """Build and partition this rank's stages, load their weights, and warn about other control tokens."""
        if warning := self._compare_token_ids():
            log.warning("%s", warning)
        self._stages = self._create_stages()
        self._stages.open()
        self._fingerprint = str(self._stages.state_dict()[FROZEN])

    def build_meta_stages(self) -> None:
        self._stages = self._create_stages()
        self._stages.build_meta_stages()

    def _create_stages(self) -> MaterializedStages:
        no_loss: Any = None
        return MaterializedStages(
            model=self.model,
            loss=no_loss,
            schedule=self.schedule,
            mesh=self.mesh,
            device=self.device,
            precision=self.precision,
            job=self.job,
            adapters=[_NoAdapter()],
            features=self.features,
            dispatcher=self.dispatcher,
            reshard_after_forward=True,
            weights=self.weights,
        )

    def describe_features(self, whole: nn.Module) -> Iterator[str]:
        return FeatureStack(self.features).describe_model(whole, self.precision)

    @property
    def forward_stages(self) -> ForwardStages:
        return self._stages

    def infer_meta_outputs(self, inputs: Any, context: BatchContext, finish: Finish) -> Any:
        count = self.model.num_hidden_layers
        span = LayerRange(count, count, embedding=True, head=True)
        with torch.no_grad():
            return self._stages.builder.build_meta_module_for_activations(span)(inputs, context, finish)

    def device_bytes(self) -> dict[MemoryKind, int]:
        return {} if self._stages is None else self._stages.device_bytes()

    def state_dict(self) -> dict[str, Any]:
        """Return the weights' fingerprint."""
        return {FROZEN: self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise KeyError for another node's state, and UserError if the run began with other weights."""
        if state.keys() != {FROZEN}:
            raise KeyError(f"the state of a frozen model has {FROZEN!r}, and this one has {sorted(state)}")
        if state != self.state_dict():
            folder = self._stages.initial_folder
            raise UserError(f"the weights in {folder} are not the weights that the run started with; restore them")


class _NoAdapter:
    """An adapter without parameters, so all parameters are frozen."""

    targets: ClassVar[Sequence[str]] = ()

    def adapt_and_list_matched_targets(self, module: nn.Module) -> Collection[str]:
        """Return no matches."""
        return ()
