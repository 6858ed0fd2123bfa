"""Tokens and epochs by source in a mixture."""

from drawloom import component
from drawloom.ports import MeasuredRows, Metric, MetricTotals, MetricValues, MovableData, Step


@component(impact="safe")
class SourceTokens(Metric):
    """
    `tokens/<source>`, a source's tokens so far, and `epochs/<source>`, the passes over the source.

    The values follow from the position in the row order, so they do not depend on restarts.
    """

    progress: MovableData
    rows: MeasuredRows

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the tokens and epochs in all steps up to this one."""
        tokens = self.progress.cumulative_tokens_by_source(step.index)
        sources = {source.name: source for source in self.rows.row_sources("train") if source.tokens}
        counts = {f"tokens/{name or 'all'}": tokens[name] for name in sources}
        epochs = {f"epochs/{name or 'all'}": tokens[name] / source.tokens for name, source in sources.items()}
        return counts | epochs
