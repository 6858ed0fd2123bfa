"""
Trains by MaxText's circular pipeline: one program for all ranks, of which autograd derives the backward pass.

Source: MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`. Each rank embeds its share of the
microbatches and computes the head and the losses of the same ones, so that no rank has more to do than another. In
between, hidden states go round the ranks' layers, in as many repeats as a rank has stages.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from drawloom.components.pipeline.circular.buffers import Buffers
from drawloom.components.pipeline.circular.one_pass import ForwardPass
from drawloom.components.pipeline.circular.ring import PendingSends, Ring, TensorMeta, begin_token
from drawloom.components.pipeline.circular.stage_passes import StagePasses
from drawloom.components.pipeline.circular.timetable import Timetable
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.pipeline.runtime.program_runner import MicrobatchInputs
from drawloom.components.pipeline.runtime.stage_runner import StageRunner
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.pipeline import LOSSES
from drawloom.components.state.step_state import StepState
from drawloom.graph import Problem, UserError, component, setting
from drawloom.graph.wiring.node import NodeView


@component(impact="safe")
class CircularExecutor(ProgramExecutor):
    """Trains by the circular pipeline; evaluates and generates by the program of forwards on the same stages."""

    delayed: bool = setting(
        default=False,
        doc="whether an output has the time of the next iteration to travel, as MaxText's "
        "`pipeline_delay_activation_forwarding`; it hides messages that take time",
    )
    embeds_on_every_rank: ClassVar[bool] = True

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Those of any executor, and what is not the same launches and the same work on every rank."""
        yield from super().constraints(node)
        if node.settings["streams"]:
            text = f"[{node.name}] does one pass after another, and none overlap"
            yield node.problem("streams", text, "write streams = false")
        stages, loss = node.neighbour("stages"), node.neighbour("objective")
        if stages and stages.settings.get("capture"):
            text = f"the passes of [{node.name}] are nodes of one autograd graph, which are not captured"
            yield stages.problem("capture", text, "write capture = false")
        if loss and loss.settings.get("reference") == "adapters":
            text = f"[{loss.name}] compares with the model without adapters on the last rank, and [{node.name}] "
            yield loss.problem("reference", f"{text}computes losses on all", 'write use = "pipeline.executor"')

    @property
    def _owners(self) -> tuple[int, ...]:
        """The rank of each stage in evaluation: the first and the last one have an end of the model each."""
        return (0, *super()._owners, self.mesh.sizes.pipeline - 1)

    def train(self, state: StepState) -> None:
        """Run the forward and backward passes of the state's batches, and write its losses."""
        self.stages.cast_weights()
        inputs = [self._inputs(batch) for batch in state["batches"]]
        group = self.mesh.pipeline_group
        repeats = (len(self._owners) - 2) // group.size
        table = Timetable(group.size, len(inputs), repeats, 2 if self.delayed else 1)
        sends = PendingSends()
        token = begin_token(sends, self.device.device)
        runners = {stage.index: StageRunner(stage, self.objective, state) for stage in self.stages.local}
        passes, share = StagePasses(runners, inputs, token), table.share(group.rank)
        embedded = [passes.forward(0, number, inputs[number].inputs) for number in share]
        one = ForwardPass(
            table,
            Ring(group.rank, group.size, self._links),
            run_block=lambda block, number, given: passes.forward(block + 1, number, given),
            metas=[self._meta(each) for each in inputs],
            buffers=Buffers.of(table, range(group.rank, group.rank + 1), embedded),
            pending_sends=sends,
            token=token,
        )
        hidden, last = one.run(), len(self._owners) - 1
        losses = [passes.forward(last, number, each) for number, each in zip(share, hidden, strict=True)]
        sends.clear()
        del hidden, embedded
        # From the token, too: a rank without a loss takes part in every exchange of gradients.
        torch.autograd.backward([*losses, one.token])
        self.stages.hand_over_gradients()
        _gather_losses(state, share, group, self.device.device)

    def _meta(self, inputs: MicrobatchInputs) -> TensorMeta:
        """What passes between the stages for a microbatch; UserError unless it is one tensor."""
        like = self.boundaries.boundary(1, inputs.inputs, inputs.shared)
        if not isinstance(like, Tensor):
            raise UserError(
                f"a stage gives a {type(like).__name__}, and the circular pipeline passes single tensors on; write "
                'use = "pipeline.executor" in [executor], with the schedule pipeline.schedules.looped_bfs',
                2,
            )
        return TensorMeta(like.shape, like.dtype, self.device.device)


def _gather_losses(state: StepState, numbers: Sequence[int], group: Group, device: torch.device) -> None:
    """Move the losses of all ranks' microbatches to the rank of the last stage; this rank computed `numbers`."""
    computed = {number: dict(_paths(state.microbatch(number)[LOSSES])) for number in numbers}
    # A rank without a microbatch does not know the names of the sums; the first rank has one.
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


def _paths(losses: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors of a microbatch's losses with their paths."""
    yield from ((("loss",), losses["loss"]), (("weight",), losses["weight"]))
    yield from ((("sums", name), tensor) for name, tensor in losses["sums"].items())
