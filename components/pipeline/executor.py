"""Executor for schedules: runs a program on this rank's stages; on one rank, this is the plain training loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.distributed.transfers import DeviceTransfers
from drawloom.components.parallel.context import ContextPart
from drawloom.components.parallel.pipeline import find_layer_conflicts
from drawloom.components.pipeline.program.builders import build_forward_only_program
from drawloom.components.pipeline.program.lowering import (
    build_program_of_rank_and_neighbours,
    check_ranks_agree_on_program,
    insert_offload_actions,
    insert_shard_actions,
    lower_to_rank_program,
)
from drawloom.components.pipeline.runtime.capture import RankGraphs
from drawloom.components.pipeline.runtime.offloads import Offloads
from drawloom.components.pipeline.runtime.p2p import P2PBuffers
from drawloom.components.pipeline.runtime.program_runner import MicrobatchInputs, ProgramRunner
from drawloom.components.pipeline.runtime.stage_runner import StageRunner
from drawloom.components.pipeline.runtime.stage_streams import StageStreams
from drawloom.components.pipeline.runtime.uploads import Uploads
from drawloom.components.ports.adapters import trains_base_weights
from drawloom.components.ports.data import uses_preference_pairs
from drawloom.components.ports.distributed import Device, Mesh, Neighbours, P2PChannel, PerDimension
from drawloom.components.ports.memory import Transfers
from drawloom.components.ports.model import BatchContext, ContextParallelModel, Finish, Head, build_meta_module_if_known
from drawloom.components.ports.pipeline import LOSSES, Loss, MeasuresStep, Referenced, Schedule, embeds_on_every_rank
from drawloom.components.ports.program import Action, Program, iterate_actions
from drawloom.components.ports.stages import FrozenModel, Stage, StageInputs, TrainableStages
from drawloom.components.state.batch import Batch
from drawloom.components.state.step_state import StepState
from drawloom.components.weights.adapted import disable_adapters
from drawloom.graph import Problem, UserError, component, setting
from drawloom.graph.wiring.node import NodeView
from drawloom.kernels.recompute import mark_as_recomputation


@attrs.frozen
class _Training:
    """Plan for a training step: this rank's actions, its stages, and the stages with a split backward pass."""

    actions: list[Action]
    split: frozenset[int]
    stages: list[Stage]


def _compute_logits(hidden: Tensor, head: Head) -> Tensor:
    """Return logits (rows, length, vocab_size) for hidden states (rows, length, hidden)."""
    return head.logits(hidden)


def _get_requested_hidden_states(last_and_requested: Any, _head: Head) -> Any:
    """Select the requested hidden states by layer from a pair: the last hidden states, and the requested ones."""
    return last_and_requested[1]


@component(impact="safe")
class ProgramExecutor:
    """Executor that runs programs on this rank's stages; on one rank, the plain training loop."""

    stages: TrainableStages
    boundaries: StageInputs
    schedule: Schedule
    objective: Loss
    mesh: Mesh
    neighbours: Neighbours
    device: Device
    frozen: FrozenModel | None = None
    streams: bool = setting(
        default=False,
        doc="one CUDA stream per stage, to run overlapping passes of a schedule concurrently; GPU only",
    )
    embeds_on_every_rank: ClassVar[bool] = False
    open_transfers: Callable[[torch.device], Transfers] = attrs.field(init=False, default=DeviceTransfers)
    _links: Mapping[int, P2PChannel] = attrs.field(init=False, factory=dict)
    _training: dict[int, _Training] = attrs.field(init=False, factory=dict)
    # forward actions by microbatch count: the trained model's, and the frozen model's
    _forward: dict[int, list[Action]] = attrs.field(init=False, factory=dict)
    _frozen_forward: dict[int, list[Action]] = attrs.field(init=False, factory=dict)
    # by sequence length: the context part on the CPU, where batches are cut, and on the device
    _parts: dict[int, tuple[ContextPart, ContextPart]] = attrs.field(init=False, factory=dict)

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
        if node.settings["streams"]:
            yield from check_streams(node, stages)
        yield from check_reference_adapters(loss, stages)
        yield from check_frozen_model(node, loss, stages)
        if (other := stages.neighbour("loss")) and other.name != loss.name:
            text = f"the stages contain the parameters of [{other.name}], but the executor computes [{loss.name}]"
            yield node.problem("objective", text, f'write objective = "@{other.name}"')

    def open(self) -> None:
        """Connect this rank to its stages' neighbours."""
        hops = {hop for hop in pairwise(self._stage_to_rank) if hop[0] != hop[1]}
        self._links = self.neighbours.open_channels(hops)

    def close(self) -> None:
        """Release host memory for activations."""
        self._offloads.transfers.close()

    @property
    def _stage_to_rank(self) -> tuple[int, ...]:
        """Return the stages' ranks."""
        return self.schedule.stage_to_rank(self.mesh.sizes.pipeline)

    def run_forward_and_backward(self, state: StepState) -> None:
        """Run the forward and backward passes for the state's batches, and write its losses."""
        training = self._plan_training_and_compare_ranks(state.microbatches)
        self.stages.cast_weights()
        inputs = self._run_forward_for_step_sums(self._upload_inputs_with_references(state["batches"]))
        if self._cuda_graphs is not None:
            inputs = self._cuda_graphs.unify_one_document_flags(inputs)
        runner = self._create_runner(inputs, state, training.stages, training.split)
        runner.streams, runner.before_action = self._streams, self.mesh.world.raise_if_broken
        if self._cuda_graphs is None:
            runner.run(training.actions)
        else:
            self._cuda_graphs.record_missing_graphs(training.actions)
            runner.run(training.actions)
            self._cuda_graphs.keep_gradients_for_next_step()
        self.stages.move_gradients_to_masters()
        self._reshard_frozen_model()
        self._write_empty_losses_if_missing(state)

    def rerun_passes_for_comparison(self, state: StepState) -> None:
        with mark_as_recomputation():
            self.run_forward_and_backward(state)

    def evaluate(self, state: StepState) -> None:
        """Run the forward passes for the state's batches, and write its losses."""
        self.stages.cast_weights()
        inputs = self._run_forward_for_step_sums(self._upload_inputs_with_references(state["batches"]))
        runner = self._create_runner(inputs, state, self.stages.local)
        # Cheaper than no_grad, because tensors get no version counters.
        with torch.inference_mode():
            runner.run(self._build_forward_program(state.microbatches))
        self._reshard_frozen_model()
        self._write_empty_losses_if_missing(state)

    def _write_empty_losses_if_missing(self, state: StepState) -> None:
        """Write empty losses if this rank computed none: it lacks the last stage, or the step has no microbatches."""
        if not state.microbatches_present(LOSSES):
            none = torch.zeros(0, device=self.device.device)
            state[LOSSES] = {"loss": none, "weight": none, "sums": {}}

    def infer(self, tokens: Tensor, shared: BatchContext) -> Tensor | None:
        """Return logits (rows, length, vocab_size) for tokens (rows, length) on the last stage's rank, else None."""
        logits: dict[int, Tensor] = {}
        self.infer_microbatches([(tokens, shared)], logits.__setitem__)
        return logits.get(0)

    def infer_hidden_states_by_layer(self, tokens: Tensor, shared: BatchContext) -> dict[int, Tensor] | None:
        """Return the hidden states requested by `shared`, by layer, on the last stage's rank; None on others."""
        states: dict[int, dict[int, Tensor]] = {}
        self.infer_microbatches([(tokens, shared)], states.__setitem__, _get_requested_hidden_states)
        return states.get(0)

    def reference_token_logps(self, batch: Batch) -> Tensor | None:
        """
        Return the log-probabilities (rows, length) of a batch's targets under the loss's reference model.

        Returns None except on the last stage's rank. Raises UserError for a loss without a reference model.
        """
        if not isinstance(self.objective, Referenced):
            raise UserError("the recipe's loss has no reference model; use a recipe with loss.dpo", 2)
        return self._compute_references(self.objective, [self._upload_inputs(batch)]).get(0)

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
        self.stages.cast_weights(only_if_changed=True)
        moved = [
            (self._uploads.start_upload(tokens), self._uploads.start_upload(shared)) for tokens, shared in microbatches
        ]
        inputs = [MicrobatchInputs(tokens, shared, finish=finish) for tokens, shared in moved]
        self._run_forward_in_inference_mode(inputs, on_output)

    def _run_forward_in_inference_mode(
        self, inputs: Sequence[MicrobatchInputs], on_output: Callable[[int, Any], None]
    ) -> None:
        """Run microbatches forward without gradients, and pass numbers and results to `on_output`."""
        runner = self._create_runner(inputs, StepState(), self.stages.local)
        runner.on_output = on_output
        with torch.inference_mode():
            runner.run(self._build_forward_program(len(inputs)))

    def _upload_inputs_with_references(self, microbatches: Iterable[Batch]) -> list[MicrobatchInputs]:
        """Return the batches' inputs, on the last stage's rank with the reference model's values."""
        inputs = [self._upload_inputs(batch) for batch in microbatches]
        if not isinstance(self.objective, Referenced) or self.objective.reference not in ("adapters", "model"):
            return inputs
        references = self._compute_references(self.objective, inputs)
        return [
            _add_reference_values(self.objective, microbatch, references.get(number))
            for number, microbatch in enumerate(inputs)
        ]

    def _run_forward_for_step_sums(self, inputs: list[MicrobatchInputs]) -> list[MicrobatchInputs]:
        """Return the inputs, on the last stage's rank with a MeasuresStep loss's sums over the step. A collective."""
        objective = self.objective
        if not isinstance(objective, MeasuresStep):
            return inputs
        outputs: dict[int, Tensor] = {}
        finishing = [_replace_loss(objective.compute_part_of_step_sums, microbatch) for microbatch in inputs]
        self._run_forward_in_inference_mode(finishing, outputs.__setitem__)
        if not outputs:  # alike on all ranks of the data group, which have the same stages
            return inputs
        sums = torch.stack([outputs[number] for number in range(len(inputs))]).sum(0)
        self.mesh.data_group.sum(sums)
        return [
            attrs.evolve(microbatch, batch=objective.with_step_sums(microbatch.batch, sums)) for microbatch in inputs
        ]

    def _compute_references(self, objective: Referenced, inputs: Sequence[MicrobatchInputs]) -> dict[int, Any]:
        """Return the reference model's values by microbatch, on the last stage's rank."""
        finishing = [_replace_loss(objective.reference_values, microbatch) for microbatch in inputs]
        if objective.reference == "model":
            return self._run_frozen_model(finishing)
        outputs: dict[int, Tensor] = {}
        with disable_adapters(stage.module for stage in self.stages.local):
            self._run_forward_in_inference_mode(finishing, outputs.__setitem__)
        # A tensor of inference mode can't be part of an autograd graph, but its clone can.
        return {number: logps.clone() for number, logps in outputs.items()}

    def _run_frozen_model(self, inputs: Sequence[MicrobatchInputs]) -> dict[int, Any]:
        """
        Run the frozen model's forward passes, and return the results by microbatch, on the last stage's rank.

        The last stage's gathered parameters, with its head, stay until `_reshard_frozen_model`.
        """
        if self.frozen is None:
            raise UserError('the loss compares with a frozen model; add a node with use = "stages.frozen"', 2)
        stages, outputs = self.frozen.forward_stages, dict[int, Any]()
        if len(inputs) not in self._frozen_forward:
            program = build_forward_only_program(self._stage_to_rank, len(inputs))
            last = len(self._stage_to_rank) - 1
            self._frozen_forward[len(inputs)] = [
                action
                for action in self._lower_to_actions(program, stages.local)
                if (action.op, action.stage) != ("RESHARD", last)
            ]
        stages.cast_weights(only_if_changed=True)
        runners = {stage.index: StageRunner(stage, self.objective) for stage in stages.local}
        runner = ProgramRunner(runners, inputs, stages, P2PBuffers(self._links, self.device.device))
        runner.on_output = outputs.__setitem__
        # Not in inference mode, whose tensors can't be part of the loss's autograd graph.
        with torch.no_grad():
            runner.run(self._frozen_forward[len(inputs)])
        return outputs

    def _reshard_frozen_model(self) -> None:
        """Free the frozen model's gathered parameters."""
        if self.frozen is not None:
            for stage in self.frozen.forward_stages.local:
                if stage.shards is not None:
                    stage.shards.reshard()

    def _create_runner(
        self,
        inputs: Sequence[MicrobatchInputs],
        state: StepState,
        local_stages: Sequence[Stage],
        split_stages: Set[int] = frozenset(),
    ) -> ProgramRunner:
        """Return a runner that writes microbatch losses into `state`."""
        new = (
            partial(StageRunner, objective=self.objective, offloads=self._offloads)
            if self._cuda_graphs is None
            else self._cuda_graphs.create_runner
        )
        stages = {stage.index: new(stage, state=state, split=stage.index in split_stages) for stage in local_stages}
        return ProgramRunner(stages, inputs, self.boundaries, P2PBuffers(self._links, self.device.device))

    def _upload_inputs(self, batch: Batch) -> MicrobatchInputs:
        """Copy this context rank's part of a batch to the device, and return it with the stages' inputs."""
        group = self.mesh.context_group
        if group.size == 1:
            moved: Batch = self._uploads.start_upload(batch)
            inputs, shared = self.objective.inputs(moved)
            if batch.has_one_document_per_row():
                shared = attrs.evolve(shared, one_document_per_row=True)
            return MicrobatchInputs(inputs, shared, moved)
        length = batch.length
        if length not in self._parts:  # cached: a copy to a GPU would wait
            part = ContextPart.for_rank(length, group)
            self._parts[length] = part, self._uploads.start_upload(part)
        host_part, device_part = self._parts[length]
        moved = self._uploads.start_upload(host_part.select_own_tokens(batch))
        inputs, shared = self.objective.inputs(moved)
        return MicrobatchInputs(inputs, attrs.evolve(shared, part=device_part), moved)

    @cached_property
    def _cuda_graphs(self) -> RankGraphs | None:
        """Return CUDA graphs if a stage captures its passes."""
        captured = any(stage.capture for stage in self.stages.local)
        return RankGraphs.create_on_gpu(self.device.device, self.objective) if captured else None

    @cached_property
    def _offloads(self) -> Offloads:
        """Return host memory for activations; it is allocated when a stage offloads them."""
        return Offloads(self.open_transfers(self.device.device))

    @cached_property
    def _streams(self) -> StageStreams | None:
        """Return a CUDA stream per stage if `streams` is set, and the device is a GPU."""
        if not self.streams or self.device.device.type != "cuda":
            return None
        return StageStreams.create(self.stages.local, partial(torch.cuda.Stream, self.device.device))

    @cached_property
    def _uploads(self) -> Uploads:
        return Uploads(self.device.device)

    def _plan_training_and_compare_ranks(self, microbatches: int) -> _Training:
        """Return the plan for a step with this many microbatches; built once, and compared between ranks."""
        # The program of a large pipeline takes milliseconds to build and lower, and is the same in every step.
        if microbatches not in self._training:
            rank, ranks = self.mesh.indices.pipeline, self.mesh.sizes.pipeline
            program = build_program_of_rank_and_neighbours(self.schedule, rank, ranks, microbatches)
            check_ranks_agree_on_program(program, rank, self.mesh.pipeline_group)
            policies = program.recompute
            local = [
                attrs.evolve(
                    stage,
                    recompute=policies[stage.index] if policies else stage.recompute,
                    offload=stage.offload or stage.index in program.offloaded,
                )
                for stage in self.stages.local
            ]
            offloaded = frozenset(stage.index for stage in local if stage.offload)
            actions = self._lower_to_actions(attrs.evolve(program, offloaded=offloaded), local)
            self._training[microbatches] = _Training(actions, find_stages_with_split_backward(actions), local)
        return self._training[microbatches]

    def _build_forward_program(self, microbatches: int) -> list[Action]:
        """Return this rank's forward-only actions for this many microbatches; built once."""
        if microbatches not in self._forward:
            program = build_forward_only_program(self._stage_to_rank, microbatches)
            self._forward[microbatches] = self._lower_to_actions(program, self.stages.local)
        return self._forward[microbatches]

    def _lower_to_actions(self, program: Program, local: Sequence[Stage]) -> list[Action]:
        """Return this rank's actions with messages; an overlap's parts follow one another."""
        line = insert_offload_actions(lower_to_rank_program(program, self.mesh.indices.pipeline), program.offloaded)
        shards = {stage.index: stage.shards for stage in local if stage.shards is not None}
        gathered = {index for index, shard in shards.items() if not shard.gathers_per_block}
        by_microbatch = {index for index, shard in shards.items() if shard.reduces_per_microbatch}
        return [*iterate_actions(insert_shard_actions(line, gathered, shards.keys(), by_microbatch))]


def _replace_loss(function: Callable[..., Any], inputs: MicrobatchInputs) -> MicrobatchInputs:
    """Return the microbatch with `function(hidden, head, batch)` as its result instead of the loss."""
    if (batch := inputs.batch) is None:
        return inputs

    def finish(hidden: Tensor, head: Head) -> Any:
        """Compute the last stage's result, in place of the loss."""
        return function(hidden, head, batch)

    # Without weights the model computes no losses of its own, such as a router's.
    return MicrobatchInputs(inputs.inputs, attrs.evolve(inputs.shared, weights=None), finish=finish)


def _add_reference_values(loss: Referenced, inputs: MicrobatchInputs, values: Any | None) -> MicrobatchInputs:
    """Add the reference model's values to the batch, on the ranks with values."""
    if inputs.batch is None or values is None:
        return inputs
    return attrs.evolve(inputs, batch=loss.with_reference(inputs.batch, values))


def check_reference_adapters(loss: NodeView, stages: NodeView) -> Iterator[Problem]:
    """Yield a problem if the loss compares with the model without adapters, but adapters are missing or unsuitable."""
    if loss.settings.get("reference") != "adapters":
        return
    adapters = stages.neighbours("adapters")
    if not adapters:
        other = ', or reference = "model" with a frozen model'
        text = f"[{loss.name}] compares the model with itself without adapters, and [{stages.name}] has no adapters"
        yield loss.problem("use", text, f'write adapters = ["@lora"] in [{stages.name}]{other}')
    for adapter in adapters:
        if trains_base_weights(adapter.component):
            text = f"[{loss.name}] compares the model with itself without adapters, which [{adapter.name}] changes"
            yield adapter.problem("use", text, f"leave it out of adapters in [{stages.name}]")


def check_frozen_model(executor: NodeView, loss: NodeView, stages: NodeView) -> Iterator[Problem]:
    """Yield problems for a missing or unused frozen model, and for one that does not fit the trained model."""
    frozen, wants = executor.neighbour("frozen"), loss.settings.get("reference") == "model"
    if frozen is None:
        if wants:
            text = f"[{loss.name}] compares with a frozen model, and [{executor.name}] has none"
            teacher = 'add [teacher] with use = "stages.frozen" and a model'
            yield loss.problem("reference", text, f'{teacher}, and frozen = "@teacher" in [{executor.name}]')
        return
    if not wants:
        hint = 'write reference = "model" in the loss if it has this setting, or leave the node out'
        yield frozen.problem("use", f"[{loss.name}] does not compare with [{frozen.name}]", hint)
        return
    model, other = stages.neighbour("model"), frozen.neighbour("model")
    if not (model and other):
        return
    sizes = [_find_vocab_size(node) for node in (model, other)]
    folder = frozen.settings.get("weights") or other.settings.get("path")
    if None not in sizes and sizes[0] != sizes[1] and not (folder and (Path(folder) / "tokenizer.json").is_file()):
        text = f"[{other.name}] has a vocabulary of {sizes[1]} ids, and [{model.name}] of {sizes[0]}"
        hint = "use models with one tokenizer; if only padding differs, copy tokenizer.json into the folder of weights"
        yield frozen.problem("model", text, hint)
    mesh, schedule = executor.neighbour("mesh"), executor.neighbour("schedule")
    if mesh and schedule:
        known = [*find_layer_conflicts(schedule, mesh, model)]
        yield from (problem for problem in find_layer_conflicts(schedule, mesh, other) if problem not in known)


def _find_vocab_size(model: NodeView) -> int | None:
    """Count the ids in a model's embedding; None if the tokenizer determines them, or they are unknown."""
    if all(model.settings.get(key) is None for key in ("vocab_size", "config", "path")):
        return None
    module = build_meta_module_if_known(model)
    tables = [] if module is None else [part for part in module.modules() if isinstance(part, nn.Embedding)]
    return tables[0].num_embeddings if tables else None


def check_streams(executor: NodeView, stages: NodeView) -> Iterator[Problem]:
    """Yield problems for `streams` with CUDA graphs, with offloading, or on the CPU."""
    if stages.settings.get("capture"):
        text = "CUDA graphs for passes share memory, so two passes can't run at the same time"
        yield executor.problem("streams", text, f"write streams = false, or capture = false in [{stages.name}]")
    schedule = executor.neighbour("schedule")
    if stages.settings.get("offload") or (schedule and schedule.settings.get("offload") is not None):
        text = "offloaded activations would be freed on another stream than they were allocated on"
        yield executor.problem("streams", text, "write streams = false, or offload nothing")
    if (device := executor.neighbour("device")) and device.settings.get("kind") == "cpu":
        yield executor.problem("streams", "the device is the CPU, which has no streams", "write streams = false")


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
    """Yield a problem if model or loss needs whole rows, but ranks along `context` partition rows."""
    if PerDimension.from_settings(mesh.settings).context == 1:
        return
    reasons = ["documents are compared as wholes"] if uses_preference_pairs(loss.component) else []
    if issubclass(model.component, ContextParallelModel):
        reasons += model.component.find_context_parallel_faults(model)
    for reason in reasons:
        text = f"rows are partitioned over the ranks along 'context', but {reason}"
        yield mesh.problem("context", text, "write context = 1")


def find_stages_with_split_backward(actions: Iterable[Action]) -> frozenset[int]:
    """Return the stages whose backward pass is split in a rank's actions."""
    return frozenset(action.stage for action in actions if action.op == "I")
