"""How much of each source of a mixture was trained on."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from drawloom.components.ports.data import MeasuredRows, SourceProgress
from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.graph import component


@component(impact="safe")
class SourceTokens:
    """
    `tokens/<source>`: the tokens of a source so far, and `epochs/<source>`: how often its tokens have come.

    They follow from the position in the order of rows, so they are the same however often a run was resumed.
    """

    progress: SourceProgress
    rows: MeasuredRows
    accumulators: ClassVar[Mapping[str, Accumulator]] = {}

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """Nothing: the loader knows it."""
        return {}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """Those of all steps up to this one."""
        found = self.progress.tokens_by_source(step.index)
        sources = {source.name: source for source in self.rows.row_sources("train") if source.tokens}
        return {
            **{f"tokens/{name or 'all'}": found[name] for name in sources},
            **{f"epochs/{name or 'all'}": found[name] / source.tokens for name, source in sources.items()},
        }
