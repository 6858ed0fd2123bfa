"""Costs by stage and op, as a plan or a trace of a run gives them."""

from collections.abc import Sequence

import attrs
import numpy as np

from drawloom.components.pipeline.program.timing import Costs, Floats
from drawloom.ports import OPS, Program


@attrs.frozen(eq=False)
class CostTable(Costs):
    """
    Costs by stage and op: `lengths` (stages, ops), ordered like OPS. `offload_by_stage` (stages,) replaces `offload`.
    """

    lengths: Floats = attrs.field(factory=lambda: np.ones((1, len(OPS))))
    offload_by_stage: Floats = attrs.field(
        default=attrs.Factory(lambda self: np.full(len(self.lengths), self.offload), takes_self=True)
    )

    def get_durations(self, program: Program) -> Floats:
        """Return the durations (actions,) for a program's actions."""
        lengths: Floats = self.lengths[program.stage, program.op]
        return lengths

    def get_duration(self, op: str, stage: int = 0) -> float:
        """Return an action's duration by op and stage."""
        if op in ("OFFLOAD", "RELOAD"):
            return float(self.offload_by_stage[stage])
        return float(self.lengths[stage, OPS.index(op)]) if op in OPS else super().get_duration(op, stage)

    def select_stages(self, stages: Sequence[int]) -> "CostTable":
        """Return the costs for some stages."""
        rows = list(stages)
        return attrs.evolve(self, lengths=self.lengths[rows], offload_by_stage=self.offload_by_stage[rows])

    def resample_to_sizes(self, sizes: Sequence[int]) -> "CostTable":
        """Return the model's costs for other stages with relative `sizes`; costs count as even within an old stage."""
        by_stage = np.column_stack([self.lengths, self.offload_by_stage])
        whole = np.concatenate([np.zeros((1, len(OPS) + 1)), by_stage.cumsum(0)])
        cuts, known = np.cumsum([0, *sizes]) / sum(sizes), np.linspace(0, 1, len(whole))
        columns: Sequence[Floats] = [np.diff(np.interp(cuts, known, sums)) for sums in whole.T]
        return attrs.evolve(self, lengths=np.stack(columns[:-1], axis=1), offload_by_stage=columns[-1])
