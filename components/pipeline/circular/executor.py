"""
Executor for MaxText's circular pipeline: one program for all ranks, whose backward pass autograd derives.

Source: MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`. Every rank embeds its share of the
microbatches, and computes their heads and losses, so all ranks have the same work. In between, hidden states pass
through all ranks' layers, in as many repeats as a rank has stages.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from drawloom import NodeView, Problem, UserError, component, setting
from drawloom.components.pipeline.circular.buffers import Buffers
from drawloom.components.pipeline.circular.one_pass import ForwardPass
from drawloom.components.pipeline.circular.ring import PendingSends, Ring, TensorMeta, create_exchange_token
from drawloom.components.pipeline.circular.stage_passes import StagePasses
from drawloom.components.pipeline.circular.timetable import Timetable
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.pipeline.runtime.stage_runner import StageRunner
from drawloom.ports import LOSSES, Group, MicrobatchInputs, StepState


@component(impact="safe")
class CircularExecutor(ProgramExecutor):
    """Executor that trains with the circular pipeline, and evaluates with a forward-only program."""

    delayed: bool = setting(
        "forward outputs one iteration later, like MaxText's `pipeline_delay_activation_forwarding`, to hide "
        "message latency",
        default=False,
    )
    embeds_on_every_rank: ClassVar[bool] = True

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield the problems of every executor, and features, which the circular pipeline does not support."""
        yield from super().constraints(node)
        for feature in node.neighbours("features"):
            text = f"[{feature.name}] acts around a program, and the passes of [{node.name}] are one autograd graph"
            yield feature.problem("use", text, f'remove [{feature.name}], or write use = "pipeline.executor"')

    @property
    def _stage_to_rank(self) -> tuple[int, ...]:
        """Return the stages' ranks in evaluation, with embedding and head as separate first and last stages."""
        return (0, *super()._stage_to_rank, self.mesh.sizes.pipeline - 1)

    def run_forward_and_backward(self, state: StepState) -> None:
        self.stages.cast_weights()
        inputs = [self._upload_inputs(batch) for batch in state["batches"]]
        group = self.mesh.pipeline_group
        repeats = (len(self._stage_to_rank) - 2) // group.size
        table = Timetable(group.size, len(inputs), repeats, 2 if self.delayed else 1)
        sends = PendingSends()
        token = create_exchange_token(sends, self.device.device)
        runners = {stage.index: StageRunner(stage, self.objective, state) for stage in self.stages.local}
        passes, share = StagePasses(runners, inputs, token), table.get_microbatches_stored_on_stage(group.rank)
        embedded = [passes.run_differentiable_pass(0, number, inputs[number].inputs) for number in share]
        forward_pass = ForwardPass(
            table,
            Ring(group.rank, group.size, self._links),
            run_block=lambda block, number, tensor: passes.run_differentiable_pass(block + 1, number, tensor),
            metas=[self._infer_stage_tensor_meta(microbatch) for microbatch in inputs],
            buffers=Buffers.with_inputs(table, range(group.rank, group.rank + 1), embedded),
            pending_sends=sends,
            token=token,
        )
        hidden, last = forward_pass.run(), len(self._stage_to_rank) - 1
        losses = [
            passes.run_differentiable_pass(last, number, states) for number, states in zip(share, hidden, strict=True)
        ]
        sends.wait_for_all()
        del hidden, embedded
        # The token starts backward passes on ranks without a loss, which take part in all exchanges of gradients.
        torch.autograd.backward([*losses, forward_pass.token])
        self.stages.move_gradients_to_masters()
        _gather_losses_on_last_stage(state, share, group, self.device.device)

    def _infer_stage_tensor_meta(self, inputs: MicrobatchInputs) -> TensorMeta:
        """Return the metadata for a microbatch's tensor between stages; UserError if a stage returns anything else."""
        like = self.stages.infer_stage_inputs(1, inputs.inputs, inputs.shared)
        if not isinstance(like, Tensor):
            raise UserError(
                f"a stage returns a {type(like).__name__}, but the circular pipeline only passes single tensors; write "
                'use = "pipeline.executor" in [executor], with the schedule pipeline.schedules.looped_bfs',
                2,
            )
        return TensorMeta(like.shape, like.dtype, self.device.device)


def _gather_losses_on_last_stage(
    state: StepState, microbatch_numbers: Sequence[int], group: Group, device: torch.device
) -> None:
    """Move all ranks' losses to the last stage's rank; this rank computed microbatches `microbatch_numbers`."""
    computed = {number: dict(_iterate_loss_tensors(state.microbatch(number)[LOSSES])) for number in microbatch_numbers}
    # A rank without microbatches does not know the names of the sums, but the first rank always has a microbatch.
    first = next(iter(computed.values()), {})
    forms = [[path, [*tensor.shape], str(tensor.dtype)] for path, tensor in first.items()]
    gathered: dict[str, Any] = {"loss": None, "weight": None, "sums": {}}
    for path, shape, dtype in group.gather_json(forms)[0]:
        dtype = getattr(torch, dtype.removeprefix("torch."))
        stacked = torch.zeros(state.microbatches, *shape, dtype=dtype, device=device)
        for number, tensors in computed.items():
            stacked[number] = tensors[tuple(path)]
        group.sum(stacked)
        *parents, name = path
        (gathered["sums"] if parents else gathered)[name] = stacked
    if group.rank < group.size - 1:
        none = torch.zeros(0, device=device)
        gathered = {"loss": none, "weight": none, "sums": {}}
    state[LOSSES] = gathered


def _iterate_loss_tensors(losses: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield a microbatch's loss, weight and sums (any shapes) with their paths, such as `("sums", name)`."""
    yield from ((("loss",), losses["loss"]), (("weight",), losses["weight"]))
    yield from ((("sums", name), tensor) for name, tensor in losses["sums"].items())
