"""
1F1B: a rank warms up with as many forwards as there are ranks behind it, then goes one forward, one backward.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.2, in the form
that flushes each step ("PipeDream-Flush", Narayanan et al., ICML 2021). Rank r of p holds at most p - r microbatches.
"""

from drawloom.components.pipeline.placement import loop
from drawloom.components.ports.program import Action, Program
from drawloom.graph import component


@component(change="free")
class OneFOneB:
    """One forward, one backward (PipeDream-Flush); on one rank, the plain training loop."""

    @property
    def stages_per_rank(self) -> int:
        """One stage on each rank."""
        return 1

    def owners(self, ranks: int) -> tuple[int, ...]:
        """For each stage the rank that holds it."""
        return loop(ranks)

    def program(self, ranks: int, microbatches: int) -> Program:
        """What each rank does, in order."""
        return Program.of([_rank(rank, ranks, microbatches) for rank in range(ranks)], self.owners(ranks))


def _rank(rank: int, ranks: int, microbatches: int) -> list[Action]:
    warmup = min(ranks - 1 - rank, microbatches)
    forwards = [Action(rank, "F", number) for number in range(microbatches)]
    backwards = [Action(rank, "B", number) for number in range(microbatches)]
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return [*forwards[:warmup], *steady, *backwards[microbatches - warmup :]]
