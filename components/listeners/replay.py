"""Replay of a microbatch on another rank, to find silent data corruption, and to name rank and layer."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from drawloom import NodeView, Problem, component, internal, setting
from drawloom.components.state.trees import list_leaves, replace_leaves
from drawloom.components.storage.tensor_source import hash_tensor_bytes
from drawloom.ports import (
    LOSSES,
    Batch,
    Cadence,
    Device,
    Event,
    EventKind,
    Executor,
    Group,
    MeasuresStep,
    Mesh,
    Model,
    Parameters,
    PerDimension,
    Stages,
    Step,
    StepState,
    create_step_state,
    describe_cadence_fault,
    exclude_from_rates,
    is_due,
    run_log,
)

Digests = dict[str, str]
"""Hashes of a microbatch's activations and their gradients by name, in the order of computation."""

BACKWARD = "the gradient"
"""Start of the names from the backward pass."""


@attrs.frozen
class ReplayDifference:
    """
    Different results for one microbatch: the first tensor with a difference, and the ranks with results.

    `position` counts the tensors computed before. `suspects` are the ranks in the minority; empty if no majority
    decides. `repeats` is False if a suspect itself got two results.
    """

    tensor: str
    ranks: Sequence[int]
    suspects: Sequence[int]
    repeats: bool = True
    position: int = 0


@component(impact="safe")
class Replay:
    """
    Comparison of one microbatch's forward and backward pass with a replay on another data-parallel rank.

    After the backward passes of some steps, every rank repeats the first microbatch of its neighbour, and compares
    hashes of all layers' outputs and gradients with those of the neighbour's own pass. Both ranks have the same weights
    (DDP, FSDP), so a difference is corruption by a device or its memory, or a nondeterministic operation. Then a third
    pass shows the rank without a majority, and an error in the log names the step, the rank and the first
    layer; training continues. On one rank the replay finds unrepeatable passes.

    A replay costs the time of a microbatch, and copies all layers' outputs to the CPU; meanwhile the step's gradients
    wait on the CPU. On a GPU it needs `deterministic = true` in the run's randomness.
    """

    observes: ClassVar[tuple[EventKind, ...]] = ("run_started", "step_started", "phase_ended")

    model: Model
    stages: Stages
    parameters: Parameters
    executor: Executor
    mesh: Mesh
    device: Device
    every: Cadence = setting('steps between replays, or "last" or "never"', default=100, check=describe_cadence_fault)

    _data_ranks: Group = internal(None)
    _hooks: list[Any] = internal(factory=list)
    _digests: Digests | None = internal(None)  # None while no pass is recorded
    _verified_step: int = internal(0)
    _is_on: bool = internal(True)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield problems if a second pass need not have the same results, or can't be observed."""
        stages, mesh, executor = map(node.neighbour, ("stages", "mesh", "executor"))
        leave_out = f"leave [{node.name}] out of the listeners"
        for adapter in stages.neighbours("adapters") if stages else ():
            if adapter.settings.get("dropout"):
                text = f"[{node.name}] repeats passes, and dropout draws new random numbers"
                yield adapter.problem("dropout", text, f"write dropout = 0.0, or {leave_out}")
        if mesh and PerDimension.from_settings(mesh.settings).expert > 1:
            text = f"[{node.name}] repeats a microbatch, whose experts also compute other ranks' tokens"
            yield mesh.problem("expert", text, f"write expert = 1, or {leave_out}")
        loss = executor and executor.neighbour("objective")
        if loss and issubclass(loss.component, MeasuresStep):
            text = f"[{node.name}] repeats one microbatch, and [{loss.name}] depends on all in the step"
            yield node.problem("use", text, leave_out)

    def open(self) -> None:
        """Observe the layers on this rank."""
        self._data_ranks = self.mesh.group("data_replicate", "data_shard")
        for stage in self.stages.local:
            blocks = self.model.blocks(stage.module)
            names = {module: name for name, module in stage.module.named_modules()}
            for block in blocks:
                name = names[block]
                self._hooks.append(block.register_forward_pre_hook(partial(self._hook_input_gradient, name)))
                is_last = block is blocks[-1]
                self._hooks.append(block.register_forward_hook(partial(self._record_output_digest, name, is_last)))

    def close(self) -> None:
        """Stop observing layers."""
        while self._hooks:
            self._hooks.pop().remove()

    def on_event(self, event: Event) -> None:
        """Record the step's own pass, and compare it with replays after the phase with the losses."""
        step = event.step
        if step is None:
            self._is_on = self._is_deterministic_else_warn()
        elif event.kind == "step_started":
            self._digests = {} if self._is_on and is_due(self.every, step) else None
        elif self._digests is not None and LOSSES in step.state:
            own, self._digests = self._digests, None
            with exclude_from_rates(step, self.mesh, self.device.device):
                self._replay_previous_rank_and_compare(step, {**own, **_hash_first_microbatch_loss(step.state)})

    def _is_deterministic_else_warn(self) -> bool:
        """Return whether passes are repeatable; if they are not, log a warning."""
        if self.device.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
            return True
        text = 'write deterministic = true in the node with use = "run.randomness"'
        run_log.warning("passes on a GPU are not replayed, because their results are not repeatable; %s", text)
        return False

    def _replay_previous_rank_and_compare(self, step: Step, own: Digests) -> None:
        """Replay the previous rank's microbatch, and decide by another replay if any rank's results differ."""
        group, batch = self._data_ranks, step.state["batches"][0]
        replays = [self._replay_keeping_gradients(shift_batch_over_ranks(batch, 1, group))]
        rows = group.gather_json([_hash_digests(own), _hash_digests(replays[0])])
        is_equal = all(rows[owner][0] == rows[(owner + 1) % group.size][1] for owner in range(group.size))
        if all(self.mesh.world.gather_json(is_equal)):
            self._verified_step = step.index
            return
        replays.append(self._replay_keeping_gradients(shift_batch_over_ranks(batch, 2, group)))
        results = group.gather_json([self.mesh.world.rank, own, *replays])
        difference = find_earliest_rank_disagreement([row[0] for row in results], [row[1:] for row in results])
        stage = self.mesh.indices.pipeline
        by_rank = self.mesh.world.gather_json(None if difference is None else [stage, attrs.asdict(difference)])
        if self.mesh.world.rank == 0:
            by_stage = [(stage, ReplayDifference(**values)) for stage, values in filter(None, by_rank)]
            run_log.error("%s", describe_difference(step.index, self._verified_step, by_stage))

    def _replay_keeping_gradients(self, batch: Batch) -> Digests:
        """Repeat another rank's microbatch, without a change to gradients, and return the digests."""
        state = create_step_state([batch])
        with self._keep_gradients_on_cpu():
            digests = self._digests = {}
            self.executor.rerun_passes_for_comparison(state)
        self._digests = None
        return {**digests, **_hash_first_microbatch_loss(state)}

    @contextmanager
    def _keep_gradients_on_cpu(self) -> Iterator[None]:
        """Keep the gradients on the CPU inside the context, to leave the device's memory to a pass."""
        parameters = [parameter for _, parameter in self.parameters.named_parameters()]
        kept = [None if parameter.grad is None else parameter.grad.cpu() for parameter in parameters]
        _set_gradients(parameters, [None] * len(kept))
        try:
            yield
        finally:
            _set_gradients(parameters, kept)

    def _hook_input_gradient(self, layer: str, _block: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Before a recorded forward pass, hook the gradient of the layer's input."""
        name = f"{BACKWARD} of the input of {layer}"
        if (digests := self._get_digests_to_record_into(f"the output of {layer}")) is not None:
            _record_gradient_digest_in_backward(digests, name, inputs)

    def _record_output_digest(self, layer: str, is_last: bool, _block: nn.Module, _inputs: Any, output: Any) -> None:
        """Record a digest of a layer's output in the first forward pass; of the last layer's also the gradient's."""
        name = f"the output of {layer}"
        if (digests := self._get_digests_to_record_into(name)) is not None:
            tensors = (leaf for leaf in list_leaves(output) if isinstance(leaf, Tensor))
            digests[name] = ",".join(map(hash_tensor_bytes, tensors))
            if is_last:
                _record_gradient_digest_in_backward(digests, f"{BACKWARD} of the output of {layer}", output)

    def _get_digests_to_record_into(self, name: str) -> Digests | None:
        """Return the digests to add a name to, if this is a recorded training pass, and the first one of the layer."""
        is_recorded = self._digests is not None and torch.is_grad_enabled() and name not in self._digests
        return self._digests if is_recorded else None


def shift_batch_over_ranks(batch: Batch, distance: int, group: Group) -> Batch:
    """Send a batch to the rank `distance` further on in the group, and return the batch received; a collective."""
    leaves = list_leaves(batch)
    described = [
        [str(leaf.dtype).removeprefix("torch."), [*leaf.shape]] if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ]
    rows = group.gather_json(described)
    source, target = (group.rank - distance) % group.size, (group.rank + distance) % group.size
    data = [leaf.detach().contiguous().view(-1).view(torch.uint8) for leaf in leaves if isinstance(leaf, Tensor)]
    specs = [(getattr(torch, leaf[0]), leaf[1]) for leaf in rows[source] if isinstance(leaf, list)]
    sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in specs]
    sent, received = [0] * group.size, [0] * group.size
    sent[target], received[source] = sum(part.numel() for part in data), sum(sizes)
    parts = torch.split(group.all_to_all(torch.cat(data), sent, received), sizes)
    tensors = iter(part.clone().view(dtype).view(shape) for part, (dtype, shape) in zip(parts, specs, strict=True))
    values = [next(tensors) if isinstance(leaf, list) else leaf for leaf in rows[source]]
    result: Batch = replace_leaves(batch, values)
    return result


def find_earliest_rank_disagreement(
    ranks: Sequence[int], results: Sequence[Sequence[Digests]]
) -> ReplayDifference | None:
    """
    Return the earliest difference among all microbatches' results, None without any.

    `results[rank][distance]` are the digests computed by a rank for the microbatch of the rank `distance` (0, 1 or 2)
    before it.
    """
    by_owner = (_find_owner_difference(owner, ranks, results) for owner in range(len(ranks)))
    return min(
        filter(None, by_owner), key=lambda difference: (difference.position, not difference.suspects), default=None
    )


def _find_owner_difference(
    owner: int, ranks: Sequence[int], results: Sequence[Sequence[Digests]]
) -> ReplayDifference | None:
    """Return the earliest difference among the three results for the microbatch of the rank at index `owner`."""
    computers = [(owner + distance) % len(ranks) for distance in range(3)]
    digests_by_computer = [results[computer][distance] for distance, computer in enumerate(computers)]
    names = [*dict.fromkeys(name for digests in digests_by_computer for name in digests)]
    for position, name in enumerate(names):
        values = [digests.get(name) for digests in digests_by_computer]
        if len({*values}) > 1:
            by_rank = [(ranks[computer], value) for computer, value in zip(computers, values, strict=True)]
            return attrs.evolve(_find_suspect_ranks(name, by_rank), position=position)
    return None


def _find_suspect_ranks(tensor: str, values: Sequence[tuple[int, str | None]]) -> ReplayDifference:
    """Return a difference with the ranks in disagreement with themselves, or else with two other ranks."""
    ranks = [*dict.fromkeys(rank for rank, _ in values)]
    unstable = [rank for rank in ranks if len({value for other, value in values if other == rank}) > 1]
    if unstable:
        return ReplayDifference(tensor, ranks, unstable, repeats=False)
    value, votes = Counter(value for _, value in values).most_common(1)[0]
    is_decided = len(ranks) > 2 and votes > 1
    return ReplayDifference(tensor, ranks, [rank for rank, other in values if other != value] if is_decided else [])


def describe_difference(step: int, verified_step: int, by_stage: Sequence[tuple[int, ReplayDifference]]) -> str:
    """
    Return a message about the earliest difference; `by_stage` has all with their pipeline ranks.

    `verified_step` is the last step whose replay had no difference, 0 without any.
    """

    def get_sort_key(item: tuple[int, ReplayDifference]) -> tuple[bool, int, int]:
        is_backward = item[1].tensor.startswith(BACKWARD)
        return is_backward, -item[0] if is_backward else item[0], item[1].position

    first = min(map(get_sort_key, by_stage))
    earliest = [difference for item in by_stage for difference in item[1:] if get_sort_key(item) == first]
    decided = [difference for difference in earliest if difference.suspects] or earliest
    suspects = sorted({rank for difference in decided for rank in difference.suspects})
    tensor = decided[0].tensor
    phase = "backward" if tensor.startswith(BACKWARD) else "forward"
    if not suspects:
        ranks = sorted({rank for difference in decided for rank in difference.ranks})
        who = f"ranks {_join_ranks_as_text(ranks)} compute the same microbatch with different results"
    elif all(difference.repeats for difference in decided):
        who = f"rank {_join_ranks_as_text(suspects)} computes a microbatch with other results than the other ranks"
    else:
        who = f"rank {_join_ranks_as_text(suspects)} computes the same microbatch twice with different results"
    known = f"from step {verified_step} or before" if verified_step else "from before the corruption"
    return (
        f"in step {step}, {who}; the first difference is {tensor}, in the {phase} pass: silent data corruption, or a "
        "nondeterministic operation; stop the run, check or replace that machine, and resume from a checkpoint "
        f"{known}, as later ones may be corrupt"
    )


def _join_ranks_as_text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Set gradients, on any device, as the parameters' gradients on their own device."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device)


def _record_gradient_digest_in_backward(digests: Digests, name: str, tree: Any) -> None:
    """Record the gradient of a tree's first differentiable tensor in its backward pass."""

    def record(gradient: Tensor) -> None:
        digests[name] = hash_tensor_bytes(gradient)

    for leaf in list_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(record)  # type: ignore[no-untyped-call]
            return


def _hash_first_microbatch_loss(state: StepState) -> Digests:
    """Return the digest of the first microbatch's loss, on ranks with the last stage."""
    losses: Tensor = state[LOSSES]["loss"]
    return {"the loss": hash_tensor_bytes(losses[0])} if len(losses) else {}


def _hash_digests(digests: Mapping[str, str]) -> str:
    """Return one digest for all."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()
