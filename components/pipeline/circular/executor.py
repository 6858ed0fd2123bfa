"""
Executor for MaxText's circular pipeline: the looped breadth-first program, with embedding and head on every rank.

Source: MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`. Every rank embeds its share of the
microbatches, and computes their heads and losses, so all ranks have the same work. In between, hidden states pass
through all ranks' layers, in as many repeats as a rank has stages. MaxText's outputs move on by one stage in every
iteration; here they are messages of a program, so that a rank waits for its input only.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import ClassVar

import attrs
import torch

from drawloom import NodeView, Problem, component
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.ports import LOSSES, Action, Group, Program, RankProgram, StepState, iterate_actions


@component(impact="safe")
class CircularExecutor(ProgramExecutor):
    """Executor that trains with the circular pipeline, and evaluates with a forward-only program."""

    embeds_on_every_rank: ClassVar[bool] = True

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield the problems of every executor, and features, which the circular pipeline does not support."""
        yield from super().constraints(node)
        for feature in node.neighbours("features"):
            text = f"[{feature.name}] acts around a program, and [{node.name}] adds passes of embedding and head to it"
            yield feature.problem("use", text, f'remove [{feature.name}], or write use = "pipeline.executor"')

    @property
    def _stage_to_rank(self) -> tuple[int, ...]:
        """Return the stages' ranks in evaluation, with embedding and head as separate first and last stages."""
        return (0, *super()._stage_to_rank, self.mesh.sizes.pipeline - 1)

    def open(self) -> None:
        """Connect this rank to its stages' neighbours, and all ranks to the first and the last rank."""
        last = self.mesh.sizes.pipeline - 1
        hops = {*pairwise(self._stage_to_rank), *((rank, end) for rank in range(last) for end in (0, last))}
        self._links = self.mesh.open_channels({hop for hop in hops if hop[0] != hop[1]})

    def run_forward_and_backward(self, state: StepState) -> None:
        super().run_forward_and_backward(state)
        group = self.mesh.pipeline_group
        share = _list_shares(group.size, state.microbatches)[group.rank]
        _gather_losses_on_last_stage(state, share, group, self.device.device)

    def _lower_training_program(self, program: Program) -> RankProgram:
        """Return this rank's program for layers, with embedding and head for its microbatches."""
        layers = [
            attrs.evolve(action, stage=action.stage + 1)
            for action in iterate_actions(super()._lower_training_program(program))
        ]
        forwards = [*takewhile(lambda action: action.op not in ("RECV_B", "B"), layers)]
        shares = _list_shares(program.ranks, program.microbatches)
        ends = _EndPasses(self.mesh.indices.pipeline, shares, len(self._stage_to_rank) - 1)
        return [*ends.surround_forward(forwards), *ends.surround_backward(layers[len(forwards) :])]


def _list_shares(ranks: int, microbatches: int) -> list[range]:
    """Return by rank the microbatches that it embeds, and whose losses it computes."""
    size = -(-microbatches // ranks)
    return [range(min(rank * size, microbatches), min((rank + 1) * size, microbatches)) for rank in range(ranks)]


@attrs.frozen
class _EndPasses:
    """This rank's embedding (stage 0) and head (stage `head`): passes and messages."""

    rank: int
    shares: Sequence[range]
    head: int

    def surround_forward(self, layers: Sequence[Action]) -> Iterator[Action]:
        """Yield the embedding's forward passes, the layers', and both passes in the head."""
        own, last = self.shares[self.rank], len(self.shares) - 1
        for number in own:
            yield Action(0, "F", number)
            if self.rank > 0:
                yield Action(0, "SEND_F", number, 0)
        if self.rank == 0:
            yield from (Action(1, "RECV_F", number, rank) for number, rank in self._list_others())
        owners = dict(self._list_others())
        for action in layers:
            yield action
            if action.op == "F" and action.stage == self.head - 1 and action.microbatch in owners:
                yield Action(action.stage, "SEND_F", action.microbatch, owners[action.microbatch])
        if self.rank < last:
            yield from (Action(self.head, "RECV_F", number, last) for number in own)
        yield from (Action(self.head, "F", number) for number in own)
        for number in reversed(own):
            yield Action(self.head, "B", number)
            if self.rank < last:
                yield Action(self.head, "SEND_B", number, last)

    def surround_backward(self, layers: Sequence[Action]) -> Iterator[Action]:
        """Yield the layers' backward passes, and then the embedding's."""
        own, owners = self.shares[self.rank], dict(self._list_others())
        if self.rank == len(self.shares) - 1:
            yield from (Action(self.head - 1, "RECV_B", number, owners[number]) for number in reversed(owners))
        for action in layers:
            yield action
            if action.op == "B" and action.stage == 1 and action.microbatch in owners:
                yield Action(1, "SEND_B", action.microbatch, owners[action.microbatch])
        if self.rank > 0:
            yield from (Action(0, "RECV_B", number, 0) for number in reversed(own))
        yield from (Action(0, "B", number) for number in reversed(own))

    def _list_others(self) -> list[tuple[int, int]]:
        """Return other ranks' microbatches with their ranks."""
        return [(number, rank) for rank, share in enumerate(self.shares) if rank != self.rank for number in share]


def _gather_losses_on_last_stage(
    state: StepState, microbatch_numbers: Sequence[int], group: Group, device: torch.device
) -> None:
    """Move all ranks' losses to the last stage's rank; this rank computed microbatches `microbatch_numbers`."""
    computed = {number: state.microbatch(number)[LOSSES] for number in microbatch_numbers}
    values = {
        number: [losses["loss"], losses["weight"], *losses["sums"].values()] for number, losses in computed.items()
    }
    # A rank without microbatches does not know the names of the sums, but the first rank always has a microbatch.
    names = list(next(iter(computed.values()))["sums"]) if computed else []
    forms = [[[*tensor.shape], str(tensor.dtype)] for tensor in next(iter(values.values()), ())]
    names, forms = group.gather_json([names, forms])[0]
    gathered = []
    for index, (shape, dtype) in enumerate(forms):
        dtype = getattr(torch, dtype.removeprefix("torch."))
        stacked = torch.zeros(state.microbatches, *shape, dtype=dtype, device=device)
        for number, tensors in values.items():
            stacked[number] = tensors[index]
        group.sum(stacked)
        gathered.append(stacked)
    if group.rank < group.size - 1:
        names, gathered = [], [torch.zeros(0, device=device)] * 2
    loss, weight, *sums = gathered
    state[LOSSES] = {"loss": loss, "weight": weight, "sums": dict(zip(names, sums, strict=True))}
