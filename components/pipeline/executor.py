"""Executor for schedules: runs a program on this rank's stages; on one rank, this is the plain training loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from torch import Tensor

from drawloom import NodeView, Problem, component, internal, wired
from drawloom.components.parallel.pipeline import find_layer_conflicts
from drawloom.kernels.recompute.marks import mark_as_recomputation
from drawloom.ports import (
    LOSSES,
    Action,
    Batch,
    BatchContext,
    Compute,
    Device,
    Finish,
    Group,
    Head,
    Loss,
    MeasuresStep,
    Mesh,
    Microbatches,
    MicrobatchInputs,
    P2PChannel,
    PassFeature,
    PassKind,
    PerDimension,
    Program,
    RankProgram,
    Referenced,
    Schedule,
    SplitModel,
    Stage,
    StageFeature,
    Stages,
    StepState,
    check_exclusions,
    embeds_on_every_rank,
    uses_preference_pairs,
)

if TYPE_CHECKING:
    from drawloom.components.parallel.context_part import ContextPart
    from drawloom.components.pipeline.runtime.program_runner import ProgramRunner
    from drawloom.components.pipeline.runtime.rank_plans import RankPlans, TrainingPlan


def _compute_logits(hidden: Tensor, head: Head) -> Tensor:
    """Return logits (rows, length, vocab_size) for hidden states (rows, length, hidden)."""
    return head.logits(hidden)


@component(impact="safe", replaced_keys={"frozen": 'a table with use = "stages.frozen", which is found by type'})
class ProgramExecutor:
    """Executor that runs programs on this rank's stages; on one rank, the plain training loop."""

    stages: Stages
    schedule: Schedule
    objective: Loss
    mesh: Mesh
    device: Device
    features: list[PassFeature] = wired(factory=list)
    embeds_on_every_rank: ClassVar[bool] = False
    _links: Mapping[int, P2PChannel] = internal(factory=dict)
    _training: "dict[int, TrainingPlan]" = internal(factory=dict)  # by microbatch count
    # by sequence length: the context part on the CPU, where batches are cut, and on the device
    _parts: "dict[int, tuple[ContextPart, ContextPart]]" = internal(factory=dict)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield conflicts between schedule, mesh, model and loss."""
        yield from check_embedding_and_head_ranks(node, cls.embeds_on_every_rank)
        mesh, schedule, stages, loss = map(node.neighbour, ("mesh", "schedule", "stages", "objective"))
        if not (mesh and schedule and stages and loss):
            return
        if model := stages.neighbour("model"):
            yield from find_layer_conflicts(schedule, mesh, model)
            yield from check_whole_row_conflicts(mesh, model, loss)
        yield from check_features(node)
        if loss.implements(Referenced) or loss.implements(MeasuresStep):
            from drawloom.components.pipeline.runtime.loss_passes import check_loss_passes

            yield from check_loss_passes(node, loss, stages)
        if (other := stages.neighbour("loss")) and other.name != loss.name:
            text = f"the stages contain the parameters of [{other.name}], but the executor computes [{loss.name}]"
            yield node.problem("objective", text, f'write objective = "@{other.name}"')

    def open(self) -> None:
        """Connect this rank to its stages' neighbours."""
        hops = {hop for hop in pairwise(self._stage_to_rank) if hop[0] != hop[1]}
        self._links = self.mesh.open_channels(hops) if hops else {}

    def close(self) -> None:
        """Release host memory for activations."""
        self._plans.close()

    @property
    def _stage_to_rank(self) -> tuple[int, ...]:
        """Return the stages' ranks."""
        return self.schedule.stage_to_rank(self.mesh.sizes.pipeline)

    def run_forward_and_backward(self, state: StepState) -> None:
        """Run the forward and backward passes for the state's batches, and write its losses."""
        # The program of a large pipeline takes milliseconds to build and lower, and is the same in every step.
        if state.microbatches not in self._training:
            self._training[state.microbatches] = self._plans.plan_training(state.microbatches, self.stages)
        training = self._training[state.microbatches]
        for copies in self.stages.weight_copies:
            copies.before_passes()
        inputs = self.prepare_inputs(state["batches"])
        runner = self._create_runner("training", training.actions, inputs, state, training.stages, training.split)
        if self.mesh.world.may_break:
            runner.before_action = self.mesh.world.raise_if_broken
        runner.run(training.features)
        for copies in self.stages.weight_copies:
            copies.after_backward()
        if not state.microbatches_present(LOSSES):
            self._write_empty_losses(state)

    def rerun_passes_for_comparison(self, state: StepState) -> None:
        with mark_as_recomputation():
            self.run_forward_and_backward(state)

    def evaluate(self, state: StepState) -> None:
        """Run the forward passes for the state's batches, and write its losses."""
        for copies in self.stages.weight_copies:
            copies.before_passes()
        inputs = self.prepare_inputs(state["batches"])
        actions = self._plans.plan_forward(state.microbatches, self.stages)
        runner = self._create_runner("evaluation", actions, inputs, state, self.stages.local)
        # Cheaper than no_grad, because tensors get no version counters.
        with torch.inference_mode():
            runner.run(self._features)
        if not state.microbatches_present(LOSSES):
            self._write_empty_losses(state)

    def _write_empty_losses(self, state: StepState) -> None:
        """Write empty losses, for a rank without the last stage, or a step without microbatches."""
        none = torch.zeros(0, device=self.device.device)
        state[LOSSES] = {"loss": none, "weight": none, "sums": {}}

    def infer(self, tokens: Tensor, shared: BatchContext, finish: Finish = _compute_logits) -> Any:
        """
        Return logits (rows, length, vocab_size) for tokens (rows, length) on the last stage's rank, else None.

        With another `finish`, return its result.
        """
        outputs: dict[int, Any] = {}
        self.infer_microbatches([(tokens, shared)], outputs.__setitem__, finish)
        return outputs.get(0)

    def infer_microbatches(
        self,
        microbatches: Sequence[tuple[Tensor, BatchContext]],
        on_output: Callable[[int, Any], None],
        finish: Finish = _compute_logits,
    ) -> None:
        """
        Compute logits by microbatch, and pass them to `on_output` on the last stage's rank.

        `on_output` accepts a microbatch's number and its logits (rows, length, vocab_size) or `finish` result.
        """
        for copies in self.stages.weight_copies:
            copies.before_passes(only_if_changed=True)
        inputs = [
            MicrobatchInputs(self._upload(tokens), self._upload(shared), finish=finish)
            for tokens, shared in microbatches
        ]
        self._run_forward_in_inference_mode(inputs, on_output)

    def _run_forward_in_inference_mode(self, inputs: Microbatches, on_output: Callable[[int, Any], None]) -> None:
        """Run microbatches forward without gradients, and pass numbers and results to `on_output`."""
        actions = self._plans.plan_forward(len(inputs), self.stages)
        runner = self._create_runner("inference", actions, inputs, StepState(), self.stages.local)
        runner.on_output = on_output
        with torch.inference_mode():
            runner.run(self._features)

    def prepare_inputs(self, batches: Iterable[Batch]) -> Microbatches:
        """Return the batches' inputs on the device, as features and a loss with passes of its own prepare them."""
        uploaded: list[MicrobatchInputs] = []
        for batch in batches:
            own, part, whole_rows = batch, None, batch.has_one_document_per_row()
            if self._context_group.size > 1:
                own, part = self._select_own_tokens(batch)
            moved: Batch = self._upload(own)
            stage_inputs, shared = self.objective.inputs(moved)
            if whole_rows or part is not None:
                shared = attrs.evolve(shared, part=part, one_document_per_row=whole_rows)
            uploaded.append(MicrobatchInputs(stage_inputs, shared, moved))
        inputs: Microbatches = uploaded
        for feature in self._features:
            inputs = feature.prepare_inputs(inputs, self)
        if isinstance(self.objective, Referenced | MeasuresStep):
            from drawloom.components.pipeline.runtime.loss_passes import prepare_loss_inputs

            inputs = prepare_loss_inputs(inputs, self)
        return inputs

    def run_forward(self, compute: Compute, microbatches: Microbatches, model: Stages | None = None) -> dict[int, Any]:
        outputs = dict[int, Any]()
        inputs = [_replace_loss(compute, microbatch) for microbatch in microbatches]
        if model is None:
            self._run_forward_in_inference_mode(inputs, outputs.__setitem__)
            return outputs
        resharding = "RESHARD", len(self._stage_to_rank) - 1
        actions = [
            action for action in self._plans.plan_forward(len(inputs), model) if (action.op, action.stage) != resharding
        ]
        runner = self._create_runner("inference", actions, inputs, StepState(), model.local, boundaries=model)
        runner.on_output = outputs.__setitem__
        # Not in inference mode, whose tensors can't be part of the loss's autograd graph.
        with torch.no_grad():
            runner.run()
        return outputs

    def _create_runner(
        self,
        kind: PassKind,
        actions: Sequence[Action],
        inputs: Microbatches,
        state: StepState,
        local_stages: Sequence[Stage],
        split_stages: Set[int] = frozenset(),
        boundaries: Stages | None = None,
    ) -> "ProgramRunner":
        """Return a runner that writes microbatch losses into `state`."""
        from drawloom.components.pipeline.runtime.program_runner import ProgramRunner
        from drawloom.components.pipeline.runtime.stage_runner import StageRunner

        stages = {
            stage.index: StageRunner(stage, self.objective, state, stage.index in split_stages)
            for stage in local_stages
        }
        buffers = None
        if self._links:
            from drawloom.components.pipeline.runtime.p2p import P2PBuffers

            buffers = P2PBuffers(self._links, self.device.device)
        return ProgramRunner(stages, inputs, boundaries or self.stages, buffers, actions, kind)

    def _select_own_tokens(self, batch: Batch) -> "tuple[Batch, ContextPart]":
        """Return this context rank's part of a batch on the host, and its part of the rows on the device."""
        if batch.length not in self._parts:  # cached: a copy to a GPU would wait
            from drawloom.components.parallel.context_part import ContextPart

            part = ContextPart.for_rank(batch.length, self._context_group)
            self._parts[batch.length] = part, self._upload(part)
        host_part, device_part = self._parts[batch.length]
        return host_part.select_own_tokens(batch), device_part

    @cached_property
    def _features(self) -> list[PassFeature]:
        """Return the features from the inside to the outside."""
        return sorted(self.features, key=lambda feature: feature.order)

    @cached_property
    def _context_group(self) -> Group:
        return self.mesh.context_group

    @cached_property
    def _upload(self) -> Callable[[Any], Any]:
        """Return the function that copies a tree of tensors to the device; on a CPU nothing is copied."""
        if self.device.device.type == "cpu":
            return lambda tree: tree
        from drawloom.components.pipeline.runtime.uploads import Uploads

        return Uploads(self.device.device).start_upload

    @cached_property
    def _plans(self) -> "RankPlans":
        from drawloom.components.pipeline.runtime.rank_plans import RankPlans  # a check plans nothing

        return RankPlans(
            schedule=self.schedule,
            mesh=self.mesh,
            device=self.device,
            features=self._features,
            stage_to_rank=self._stage_to_rank,
            lower=self._lower_training_program,
        )

    def _lower_training_program(self, program: Program) -> RankProgram:
        """Return this rank's program, with messages and activation transfers."""
        from drawloom.components.pipeline.program.lowering import insert_offload_actions, lower_to_rank_program

        return insert_offload_actions(lower_to_rank_program(program, self.mesh.indices.pipeline), program.offloaded)


def _replace_loss(compute: Compute, inputs: MicrobatchInputs) -> MicrobatchInputs:
    """Return the microbatch with `compute`'s result instead of the loss."""
    if (batch := inputs.batch) is None:
        return inputs

    def finish(hidden: Tensor, head: Head) -> Any:
        """Compute the last stage's result, in place of the loss."""
        return compute(hidden, head, batch)

    # Without weights the model computes no losses of its own, such as a router's.
    return MicrobatchInputs(inputs.inputs, attrs.evolve(inputs.shared, weights=None), finish=finish)


def check_features(executor: NodeView) -> Iterator[Problem]:
    """Yield the features' problems with the executor, and with nodes that they exclude."""
    for feature in executor.neighbours("features"):
        component: type[PassFeature] = feature.component
        yield from component.check_passes(feature, executor)
        if not issubclass(component, StageFeature):  # the stages check its exclusions
            yield from check_exclusions(feature)


def check_embedding_and_head_ranks(executor: NodeView, on_all_ranks: bool) -> Iterator[Problem]:
    """
    Yield a problem if only one of schedule and executor has embedding and head on all ranks.

    `on_all_ranks` is the executor's choice.
    """
    if (schedule := executor.neighbour("schedule")) is None:
        return
    schedule_is_everywhere = embeds_on_every_rank(schedule.component)
    if schedule_is_everywhere and not on_all_ranks:
        text = f"[{schedule.name}] places embedding and head on every rank, for the circular pipeline"
        yield executor.problem("use", text, 'write use = "pipeline.circular.executor"')
    elif on_all_ranks and not schedule_is_everywhere:
        text = f"[{executor.name}] runs the circular pipeline's own program, not the program of [{schedule.name}]"
        yield schedule.problem("use", text, 'write use = "pipeline.schedules.circular"')


def check_whole_row_conflicts(mesh: NodeView, model: NodeView, loss: NodeView) -> Iterator[Problem]:
    """Yield a problem if model or loss needs whole rows, or the layers on one rank, but ranks partition them."""
    sizes = PerDimension.from_settings(mesh.settings)
    for dimension, parts, ranks in (("context", "rows", sizes.context), ("pipeline", "layers", sizes.pipeline)):
        if ranks == 1:
            continue
        is_paired = dimension == "context" and uses_preference_pairs(loss.component)
        reasons = ["documents are compared as wholes"] if is_paired else []
        if issubclass(model.component, SplitModel):
            reasons += model.component.find_split_faults(model, dimension, ranks)
        for reason in reasons:
            text = f"{parts} are partitioned over the ranks along {dimension!r}, but {reason}"
            yield mesh.problem(dimension, text, f"write {dimension} = 1")
