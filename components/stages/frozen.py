"""A frozen second model, with stages on the same ranks as the trained one: a teacher, or a reference model."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from torch import nn

from drawloom import NodeView, Problem, UserError, component, internal, setting, wired
from drawloom.components.parallel.dimensions import DIMENSIONS
from drawloom.components.parallel.pipeline import find_layer_conflicts
from drawloom.components.stages.checks import check_features, check_initial_folder, find_stage_nodes
from drawloom.components.stages.feature_stack import FeatureStack
from drawloom.components.stages.materialized import FROZEN, MaterializedStages
from drawloom.components.weights.token_ids import compare_folder_ids
from drawloom.ports import (
    BatchContext,
    Device,
    Dispatcher,
    Finish,
    ForwardRunner,
    LayerRange,
    MemoryKind,
    Mesh,
    Microbatches,
    Model,
    NodeState,
    PassFeature,
    PassRun,
    Precision,
    PretrainedModel,
    Referenced,
    RunInfo,
    Schedule,
    StageFeature,
    Tokenizer,
    add_reference_values,
    build_meta_module_if_known,
    run_log,
)


@component
class FrozenStages(PassFeature):
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
        "Hugging Face folder with the weights; default: the folder of `model.auto`", default=None
    )
    _stages: MaterializedStages = internal(None)
    _fingerprint: str = internal("")

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
        for number, feature in enumerate(node.neighbours("features")):
            if not node.nodes[feature.name].owner:
                text = f"[{feature.name}] has a table of its own, by which it belongs to the trained model"
                hint = f'write it into the list: {{ use = "{feature.use}" }}'
                yield node.problem(("features", number), text, hint)

    @classmethod
    def notes(cls, node: NodeView) -> Iterator[str]:
        """Yield the features' sentences for `explain`."""
        from drawloom.components.stages.notes import describe_features

        if nodes := find_stage_nodes(node):
            yield from describe_features(nodes)

    @classmethod
    def check_passes(cls, feature: NodeView, executor: NodeView) -> Iterator[Problem]:
        """Yield problems if the loss does not compare with the model, or the model does not fit the trained one."""
        loss, stages = executor.neighbour("objective"), executor.neighbour("stages")
        if loss and loss.settings.get("reference") != "model":
            hint = 'write reference = "model" in the loss if it has this setting, or leave the node out'
            yield feature.problem("use", f"[{loss.name}] does not compare with [{feature.name}]", hint)
            return
        model, other = stages and stages.neighbour("model"), feature.neighbour("model")
        if not (model and other):
            return
        sizes = [_find_vocab_size(node) for node in (model, other)]
        folder = feature.settings["weights"] or other.settings.get("path")
        if None not in sizes and sizes[0] != sizes[1] and not (folder and (Path(folder) / "tokenizer.json").is_file()):
            text = f"[{other.name}] has a vocabulary of {sizes[1]} ids, and [{model.name}] of {sizes[0]}"
            same = "use models with one tokenizer"
            hint = f"{same}; if only padding differs, copy tokenizer.json into the folder of weights"
            yield feature.problem("model", text, hint)
        mesh, schedule = executor.neighbour("mesh"), executor.neighbour("schedule")
        if mesh and schedule:
            known = [*find_layer_conflicts(schedule, mesh, model)]
            yield from (problem for problem in find_layer_conflicts(schedule, mesh, other) if problem not in known)

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
            run_log.warning("%s", warning)
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
            adapters=[_FreezeAll()],
            features=self.features,
            dispatcher=self.dispatcher,
            reshard_after_forward=True,
            weights=self.weights,
        )

    def describe_features(self, whole: nn.Module) -> Iterator[str]:
        return FeatureStack(self.features).describe_model(whole, self.precision)

    def prepare_inputs(self, microbatches: Microbatches, runner: ForwardRunner) -> Microbatches:
        """Return the microbatches, on the last stage's rank with this model's values."""
        loss = runner.objective
        if not isinstance(loss, Referenced) or loss.reference != "model":
            return microbatches
        for copies in self._stages.weight_copies:
            copies.before_passes(only_if_changed=True)
        return add_reference_values(
            loss, microbatches, runner.run_forward(loss.reference_values, microbatches, self._stages)
        )

    def end_run(self, run: PassRun) -> None:
        """Free the gathered parameters after the passes with the loss."""
        if run.kind != "inference":
            for stage in self._stages.local:
                if stage.shards is not None:
                    stage.shards.reshard()

    def infer_meta_outputs(self, inputs: Any, context: BatchContext, finish: Finish) -> Any:
        count = self.model.num_hidden_layers
        span = LayerRange(count, count, embedding=True, head=True)
        with torch.no_grad():
            return self._stages.builder.build_meta_module_for_activations(span)(inputs, context, finish)

    def device_bytes(self) -> dict[MemoryKind, int]:
        return {} if self._stages is None else self._stages.device_bytes()

    def state_dict(self) -> NodeState:
        """Return the weights' fingerprint."""
        return {FROZEN: self._fingerprint}

    def load_state_dict(self, state: NodeState) -> None:
        """Raise KeyError for another node's state, and UserError if the run began with other weights."""
        if state.keys() != {FROZEN}:
            raise KeyError(f"the state of a frozen model has {FROZEN!r}, and this one has {sorted(state)}")
        if state != self.state_dict():
            folder = self._stages.initial_folder
            raise UserError(f"the weights in {folder} are not the weights that the run started with; restore them")


class _FreezeAll:
    """An adapter without parameters, so all parameters are frozen."""

    targets: ClassVar[Sequence[str]] = ()

    def adapt_and_list_matched_targets(self, module: nn.Module) -> Collection[str]:
        """Return no matches."""
        return ()


def _find_vocab_size(model: NodeView) -> int | None:
    """Count the ids in a model's embedding; None if the tokenizer determines them, or they are unknown."""
    if all(model.settings.get(key) is None for key in ("vocab_size", "config", "path")):
        return None
    module = build_meta_module_if_known(model)
    tables = [] if module is None else [part for part in module.modules() if isinstance(part, nn.Embedding)]
    return tables[0].num_embeddings if tables else None
