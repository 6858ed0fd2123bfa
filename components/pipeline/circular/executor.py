"""
Trains by MaxText's circular pipeline: one program for all ranks, of which autograd derives the backward pass.

Source: MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`. Each rank embeds its share of the
microbatches and computes the head and the losses of the same ones, so that no rank has more to do than another. In
between, hidden states go round the ranks' layers, in as many repeats as a rank has stages.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from drawloom.components.pipeline.circular.buffers import Buffers
from drawloom.components.pipeline.circular.one_pass import ForwardPass
from drawloom.components.pipeline.circular.ring import PendingSends, Ring, TensorMeta, begin_token
from drawloom.components.pipeline.circular.stage_passes import StagePasses
from drawloom.components.pipeline.circular.timetable import Timetable
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.pipeline.runtime.program_runner import MicrobatchInputs
from drawloom.components.pipeline.runtime.stage_runner import LossSums, StageRunner, sum_losses
from drawloom.components.ports.data import Batch
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.pipeline import Losses
from drawloom.graph import Problem, UserError, component, setting
from drawloom.graph.build.node import NodeView


@component(impact="safe")
class CircularExecutor(ProgramExecutor):
    """Trains by the circular pipeline; evaluates and generates by the program of forwards on the same stages."""

    delayed: bool = setting(
        default=False,
        doc="whether an output has the time of the next iteration to travel, as MaxText's "
        "`pipeline_delay_activation_forwarding`; it hides messages that take time",
    )
    ends_on_every_rank: ClassVar[bool] = True

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Those of any executor, and what is not the same launches and the same work on every rank."""
        yield from super().constraints(node)
        if node.settings["streams"]:
            text = f"[{node.name}] does one pass after another, and none overlap"
            yield node.problem("streams", text, "write streams = false")
        for stages in node.neighbours("stages"):
            if stages.settings.get("capture"):
                text = f"the passes of [{node.name}] are nodes of one autograd graph, which are not captured"
                yield stages.problem("capture", text, "write capture = false")
        for loss in node.neighbours("objective"):
            if loss.settings.get("reference") == "adapters":
                text = f"[{loss.name}] compares with the model without adapters on the last rank, and [{node.name}] "
                yield loss.problem("reference", f"{text}computes losses on all", 'write use = "pipeline.executor"')

    @property
    def _owners(self) -> tuple[int, ...]:
        """The rank of each stage in evaluation: the first and the last one have an end of the model each."""
        return (0, *super()._owners, self.mesh.size("pipeline") - 1)

    def train(self, microbatches: Sequence[Batch]) -> Losses:
        """Forward and backward of every microbatch; gradients of the sum of losses are added to the parameters'."""
        self.stages.cast_weights()
        inputs = [self._inputs(batch) for batch in microbatches]
        group, found = self.mesh.group("pipeline"), dict[int, LossSums]()
        repeats = (len(self._owners) - 2) // group.size
        table = Timetable(group.size, len(inputs), repeats, 2 if self.delayed else 1)
        sends = PendingSends()
        token = begin_token(sends, self.device.device)
        runners = {stage.index: StageRunner(stage, self.objective, found) for stage in self.stages.local}
        passes, share = StagePasses(runners, inputs, token), table.share(group.rank)
        embedded = [passes.forward(0, number, inputs[number].tokens) for number in share]
        one = ForwardPass(
            table,
            Ring(group.rank, group.size, self._links),
            lambda block, number, given: passes.forward(block + 1, number, given),
            [self._meta(each) for each in inputs],
            Buffers.of(table, range(group.rank, group.rank + 1), embedded),
            sends,
            token,
        )
        hidden, last = one.run(), len(self._owners) - 1
        losses = [passes.forward(last, number, each) for number, each in zip(share, hidden, strict=True)]
        sends.clear()
        del hidden, embedded
        # From the token, too: a rank without a loss takes part in every exchange of gradients.
        torch.autograd.backward([*losses, one.token])
        self.stages.hand_over_gradients()
        return sum_losses(_joined(group, found, len(inputs), self.device.device), self.device.device)

    def _meta(self, inputs: MicrobatchInputs) -> TensorMeta:
        """What passes between the stages for a microbatch; UserError unless it is one tensor."""
        like = self.boundaries.boundary(1, inputs.tokens, inputs.shared)
        if not isinstance(like, Tensor):
            raise UserError(
                f"a stage gives a {type(like).__name__}, and the circular pipeline passes single tensors on; write "
                'use = "pipeline.executor" in [executor], with the schedule pipeline.schedules.looped_bfs',
                2,
            )
        return TensorMeta(like.shape, like.dtype, self.device.device)


def _joined(group: Group, found: dict[int, LossSums], count: int, device: torch.device) -> dict[int, LossSums]:
    """The losses of all ranks' microbatches, on the rank of the last stage; none on others."""
    mine = {}
    for number, (loss, weight, sums) in found.items():
        # under names that neither the loss nor the weight has
        mine[number] = {"loss": loss, "weight": weight} | {f"sums.{name}": each for name, each in sums.items()}
    # A rank without a microbatch does not know what the loss is made of, and the first rank has one.
    first = next(iter(mine.values()), {})
    described = {name: [[*each.shape], str(each.dtype)] for name, each in first.items()}
    whole = {}
    for name, (shape, dtype) in group.gather_json(described)[0].items():
        every = torch.zeros(count, *shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        for number, values in mine.items():
            every[number] = values[name]
        group.sum(every)
        whole[name] = every
    if group.rank < group.size - 1:
        return {}
    losses, weights = whole.pop("loss"), whole.pop("weight")
    named = {name.removeprefix("sums."): each for name, each in whole.items()}
    return {
        number: (losses[number], weights[number], {name: each[number] for name, each in named.items()})
        for number in range(count)
    }
