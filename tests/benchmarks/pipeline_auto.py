"""
The schedule that `pipeline.schedules.auto` finds, beside the best published one, in 360 cells.

Each cell has a number of ranks and microbatches, a cost of the last rank's equal share of the model (1.3: the head and
the loss cost 0.3 of a share more), a latency in forwards of a share, and a memory limit in microbatches' activations of
a share. All schedules run the same model: with two stages a rank, each has half of a share; `auto` may join half shares
to stages as it likes. Torch has those in TORCHS
too, action by action (`tests/schedules/test_torch.py`).
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import attrs
import numpy as np

from drawloom.components.pipeline.program.list_scheduling import peak_activations
from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.program.timing import time as timed
from drawloom.components.pipeline.schedules.auto import Auto, published
from drawloom.components.ports.program import Program

RANKS, ROUNDS, LAST, LATENCIES, MEMORIES = (
    (2, 4, 8, 16),
    (1, 2, 4),
    (1.0, 1.3, 1.6),
    (0.0, 0.25),
    (0.5, 0.75, 1, 1.5, 2),
)
"""Of MEMORIES each is times the number of ranks; 1F1B needs 1."""

TORCHS = {
    "GPipe",
    "OneFOneB",
    "LoopedBreadthFirst",
    "Interleaved1F1B",
    "ZeroBubble1P",
    "ZeroBubbleV",
    "DualPipeV",
}


@attrs.frozen
class Cell:
    """One pipeline."""

    ranks: int
    microbatches: int
    last: float
    latency: float
    memory: float
    parts: int = 2  # slices of a share

    @property
    def slices(self) -> list[float]:
        """The costs of slices."""
        return [1 / self.parts] * (self.parts * self.ranks - 1) + [self.last - 1 + 1 / self.parts]

    def makespan(self, program: Program, sizes: Sequence[int] = ()) -> float:
        """How long a program takes with this cell's costs, worked out here apart from `Auto`."""
        sizes = sizes or self.even(program)
        bounds = np.cumsum([0, *sizes])
        factors = tuple(sum(self.slices[first:last]) for first, last in pairwise(bounds))
        return timed(program, Costs(comm=self.latency, factors=factors)).makespan

    def fits(self, program: Program, sizes: Sequence[int] = ()) -> bool:
        """Whether no rank holds more than the limit."""
        share = self.ranks / len(self.slices)
        held = [share * size for size in sizes or self.even(program)]
        return max(peak_activations(program, held)) <= self.memory + 1e-9

    def even(self, program: Program) -> list[int]:
        """As many slices in each stage."""
        return [len(self.slices) // program.stages] * program.stages

    def best_published(self, names: set[str] | None = None) -> tuple[float, str]:
        """The shortest published program that fits, and its name; infinite if none does."""
        made = [schedule for stages in (1, 2) for schedule in published(stages)]
        programs = [(type(each).__name__, each.program(self.ranks, self.microbatches)) for each in made]
        fitting = [(name, program) for name, program in programs if self.fits(program) and name in (names or {name})]
        return min(((self.makespan(program), name) for name, program in fitting), default=(float("inf"), "none"))

    def found(self) -> tuple[Program, Sequence[int]]:
        """The program that `Auto` finds, and how many slices each of its stages has."""
        auto = Auto(comm=self.latency, slices=self.slices, memory=self.memory, microbatches=self.microbatches)
        return auto.program(self.ranks, self.microbatches), auto.layers_by_stage(self.ranks, len(self.slices))


def cells() -> Iterator[Cell]:
    """All 360."""
    for ranks, rounds, last, latency, memory in product(RANKS, ROUNDS, LAST, LATENCIES, MEMORIES):
        yield Cell(ranks, ranks * rounds, last, latency, memory * ranks)


def main() -> None:
    """Print a row for each cell, and how often auto is worse, its median gain, and the time of a large search."""
    head = f"{'p':>3}{'m':>5}{'last':>6}{'late':>6}{'memory':>8}{'auto':>9}{'best':>9}{'torch':>9}{'gain':>7}"
    print(f"{head}  best published")
    worse, gains, of_layers = 0, [], []
    for cell in cells():
        found = cell.found()
        ours, (best, name), (torchs, _) = cell.makespan(*found), cell.best_published(), cell.best_published(TORCHS)
        worse += ours > best * (1 + 1e-9) or not cell.fits(*found)
        gain = 1 - ours / best
        if (cell.last, cell.latency) == (1.3, 0.25) and best < float("inf"):
            gains.append(gain)
            finer = attrs.evolve(cell, parts=8)
            of_layers.append(1 - finer.makespan(*finer.found()) / best)
        place = f"{cell.ranks:3}{cell.microbatches:5}{cell.last:6}{cell.latency:6}{cell.memory:8}"
        print(f"{place}{ours:9.2f}{best:9.2f}{torchs:9.2f}{gain:7.1%}  {name}", flush=True)
    print(f"worse than the best published schedule that fits: {worse} cells")
    print(f"last 1.3, latency 0.25: median gain {statistics.median(gains):.1%} of {len(gains)} cells")
    print(f"with 8 layers in each share, which stages may have more or fewer of: {statistics.median(of_layers):.1%}")
    began = time.perf_counter()
    cell = Cell(64, 256, 1.3, 0.25, 64)
    found = cell.found()
    seconds = time.perf_counter() - began
    ours, (best, name) = cell.makespan(*found), cell.best_published()
    print(f"64 ranks, 256 microbatches: {ours:.1f}, {name} {best:.1f}; found in {seconds:.1f} s")


if __name__ == "__main__":
    main()
