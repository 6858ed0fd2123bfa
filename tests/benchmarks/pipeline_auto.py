"""
The schedule that `pipeline.schedules.auto` finds, beside the best published one, in 360 cells.

Each cell has a number of ranks and microbatches, a cost of the last rank's equal share of the model (1.3: the head and
the loss cost 0.3 of a share more), a latency in forwards of a share, and a memory limit in microbatches' activations of
a share. All schedules run the same model: with two stages a rank, each has half of a share; `auto` may join half shares
to stages as it likes. Torch has those in TORCHS
too, action by action (`tests/schedules/test_torch.py`).

`again` is `auto` where stages may recompute, at what that costs Qwen3-0.6B in microbatches of 4 x 4096 tokens.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Literal

import attrs
import numpy as np

from drawloom.components.pipeline.program.list_scheduling import peak_activations
from drawloom.components.pipeline.program.timing import CostTable
from drawloom.components.pipeline.program.timing import time as timed
from drawloom.components.pipeline.schedules.auto import Auto, Recomputation, list_published
from drawloom.components.ports.program import Program
from drawloom.components.ports.stages import Recompute

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


RECOMPUTE: dict[Literal["selective", "blocks"], Recomputation] = {
    "selective": Recomputation(again=0.14, kept=0.68),
    "blocks": Recomputation(again=0.88, kept=0.17),
}
"""Those of a layer, as `drawloom plan qwen3_0_6b --device h200` has them."""

NOTHING: tuple[Recompute, ...] = ("none",)


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
        factors = np.array([sum(self.slices[first:last]) for first, last in pairwise(bounds)])
        again = 1 + np.array([_part(*each, "again", 0.0) for each in self._policies(program, sizes)])
        lengths = factors[:, None] * np.stack([0 * again + 1, again + 1, again, 0 * again + 1], axis=1)
        return timed(program, CostTable(comm=self.latency, lengths=lengths)).makespan

    def fits(self, program: Program, sizes: Sequence[int] = ()) -> bool:
        """Whether no rank holds more than the limit."""
        share, sizes = self.ranks / len(self.slices), sizes or self.even(program)
        pending = [share * size for size in sizes]
        kept = [_part(*each, "kept", 1.0) for each in self._policies(program, sizes)]
        held = [part * size for part, size in zip(kept, pending, strict=True)]
        return max(peak_activations(program, held, pending)) <= self.memory + 1e-9

    def _policies(self, program: Program, sizes: Sequence[int]) -> list[tuple[Recompute, int]]:
        """What each stage recomputes, and how many slices it has."""
        return list(zip(program.recompute or NOTHING * program.stages, sizes, strict=True))

    def even(self, program: Program) -> list[int]:
        """As many slices in each stage."""
        return [len(self.slices) // program.stages] * program.stages

    def best_published(self, names: set[str] | None = None) -> tuple[float, str]:
        """The shortest published program that fits, and its name; infinite if none does."""
        made = [schedule for stages in (1, 2) for schedule in list_published(stages)]
        programs = [(type(each).__name__, each.program(self.ranks, self.microbatches)) for each in made]
        fitting = [(name, program) for name, program in programs if self.fits(program) and name in (names or {name})]
        return min(((self.makespan(program), name) for name, program in fitting), default=(float("inf"), "none"))

    def found(self, recomputes: bool = False) -> tuple[Program, Sequence[int]]:
        """The program that `Auto` finds, and how many slices each of its stages has."""
        again, settings = RECOMPUTE if recomputes else {}, {"comm": self.latency, "microbatches": self.microbatches}
        auto = Auto(slices=self.slices, memory=self.memory, recompute=again, **settings)  # type: ignore[arg-type]
        return auto.program(self.ranks, self.microbatches), auto.layers_by_stage(self.ranks, len(self.slices))


def _part(policy: Recompute, size: int, what: str, otherwise: float) -> float:
    """The part of a forward that a stage of so many slices does again, or of its activations that it keeps."""
    if policy == "none":
        return otherwise
    blocks = -(-size // policy) / size if isinstance(policy, int) else 1.0
    part: float = getattr(RECOMPUTE["selective" if policy == "selective" else "blocks"], what)
    return otherwise + blocks * (part - otherwise)


def cells() -> Iterator[Cell]:
    """All 360."""
    for ranks, rounds, last, latency, memory in product(RANKS, ROUNDS, LAST, LATENCIES, MEMORIES):
        yield Cell(ranks, ranks * rounds, last, latency, memory * ranks)


def main() -> None:
    """Print a row for each cell, and how often auto is worse, its median gain, and the time of a large search."""
    head = f"{'p':>3}{'m':>5}{'last':>6}{'late':>6}{'memory':>8}{'auto':>9}{'best':>9}{'torch':>9}{'gain':>7}"
    head += f"{'again':>9}{'gain':>7}"
    print(f"{head}  best published")
    worse, gains, of_layers = 0, [], []
    by_memory: dict[float, list[float]] = {memory: [] for memory in MEMORIES}
    for cell in cells():
        found = cell.found()
        ours, (best, name), (torchs, _) = cell.makespan(*found), cell.best_published(), cell.best_published(TORCHS)
        worse += ours > best * (1 + 1e-9) or not cell.fits(*found)
        gain = 1 - ours / best
        another = cell.found(recomputes=True)
        again = cell.makespan(*another)
        worse += again > ours * (1 + 1e-9) or not cell.fits(*another)
        by_memory[cell.memory / cell.ranks].append(1 - again / ours)
        if (cell.last, cell.latency) == (1.3, 0.25) and best < float("inf"):
            gains.append(gain)
            finer = attrs.evolve(cell, parts=8)
            of_layers.append(1 - finer.makespan(*finer.found()) / best)
        place = f"{cell.ranks:3}{cell.microbatches:5}{cell.last:6}{cell.latency:6}{cell.memory:8}"
        print(
            f"{place}{ours:9.2f}{best:9.2f}{torchs:9.2f}{gain:7.1%}{again:9.2f}{1 - again / ours:7.1%}  {name}",
            flush=True,
        )
    print(f"worse than the best published schedule that fits, or with recomputation than without: {worse} cells")
    for memory, parts in by_memory.items():
        some = f"{sum(part > 1e-9 for part in parts)} of {len(parts)} cells"
        most = f"median gain {statistics.median(parts):.1%}, up to {max(parts):.1%}"
        print(f"recomputation, memory {memory}: {most}; {some}")
    print(f"last 1.3, latency 0.25: median gain {statistics.median(gains):.1%} of {len(gains)} cells")
    print(f"with 8 layers in each share, which stages may have more or fewer of: {statistics.median(of_layers):.1%}")
    began = time.perf_counter()
    cell = Cell(64, 256, 1.3, 0.25, 64)
    found = cell.found()
    seconds = time.perf_counter() - began
    cell.found(recomputes=True)
    more = time.perf_counter() - began - seconds
    ours, (best, name) = cell.makespan(*found), cell.best_published()
    took = f"found in {seconds:.1f} s, in {more:.1f} s with recomputation"
    print(f"64 ranks, 256 microbatches: {ours:.1f}, {name} {best:.1f}; {took}")


if __name__ == "__main__":
    main()
