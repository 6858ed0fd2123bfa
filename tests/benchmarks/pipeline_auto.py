"""
The schedule from `pipeline.schedules.auto` compared with the best published schedule, in 360 cells.

A share is the layers of one rank if all ranks have equally many. A cell sets the number of ranks and microbatches, the
cost of the last rank's share (1.3: the head and the loss cost 0.3 shares more), a latency in units of one share's
forward pass, and a memory limit in units of one microbatch's activations in one share. All schedules run the same
model: with two stages per rank, a stage has half a share; `auto` may join half shares to stages as it likes. torch has
the schedules in TORCH_SCHEDULES, action by action (`tests/schedules/test_torch.py`).

The column `again` is `auto` with activation checkpointing allowed, at the recompute costs measured for Qwen3-0.6B with
microbatches of 4 x 4096 tokens.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Literal

import attrs
import numpy as np

from drawloom.components.pipeline.program.list_scheduling import compute_peak_activations
from drawloom.components.pipeline.program.timing import CostTable
from drawloom.components.pipeline.program.timing import compute_timing as time_program
from drawloom.components.pipeline.schedules.auto import Auto, Recomputation, list_published_schedules
from drawloom.components.ports.program import Program
from drawloom.components.ports.stages import Recompute

RANKS, ROUNDS, LAST, LATENCIES, MEMORIES = (
    (2, 4, 8, 16),
    (1, 2, 4),
    (1.0, 1.3, 1.6),
    (0.0, 0.25),
    (0.5, 0.75, 1, 1.5, 2),
)
"""MEMORIES are multiplied by the number of ranks; 1F1B needs 1."""

TORCH_SCHEDULES = {
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
"""Recompute costs of one layer, from `drawloom plan qwen3_0_6b --device h200`."""

NOTHING: tuple[Recompute, ...] = ("none",)


@attrs.frozen
class Cell:
    """Ranks, microbatches, costs and memory limit of one pipeline."""

    ranks: int
    microbatches: int
    last: float
    latency: float
    memory: float
    parts: int = 2  # slices of a share

    @property
    def slices(self) -> list[float]:
        """Return the cost of every slice."""
        return [1 / self.parts] * (self.parts * self.ranks - 1) + [self.last - 1 + 1 / self.parts]

    def makespan(self, program: Program, sizes: Sequence[int] = ()) -> float:
        """Return a program's duration with this cell's costs, computed independently of `Auto`."""
        sizes = sizes or self.even(program)
        bounds = np.cumsum([0, *sizes])
        costs = np.array([sum(self.slices[first:last]) for first, last in pairwise(bounds)])
        recomputed = 1 + np.array(self._fractions("again", 0.0, program, sizes))
        lengths = costs[:, None] * np.stack(
            [0 * recomputed + 1, recomputed + 1, recomputed, 0 * recomputed + 1], axis=1
        )
        return time_program(program, CostTable(comm=self.latency, lengths=lengths)).makespan

    def fits(self, program: Program, sizes: Sequence[int] = ()) -> bool:
        """Return whether every rank stays within the memory limit."""
        share, sizes = self.ranks / len(self.slices), sizes or self.even(program)
        pending = [share * size for size in sizes]
        kept = self._fractions("kept", 1.0, program, sizes)
        kept_activations = [part * size for part, size in zip(kept, pending, strict=True)]
        return max(compute_peak_activations(program, kept_activations, pending)) <= self.memory + 1e-9

    def _fractions(self, quantity: str, default: float, program: Program, sizes: Sequence[int]) -> list[float]:
        policies = zip(program.recompute or NOTHING * program.stages, sizes, strict=True)
        return [_recompute_fraction(policy, size, quantity, default) for policy, size in policies]

    def even(self, program: Program) -> list[int]:
        """Return equal slice counts for all stages."""
        return [len(self.slices) // program.stages] * program.stages

    def best_published(self, names: set[str] | None = None) -> tuple[float, str]:
        """Return the makespan and name of the shortest published program that fits, or infinity."""
        schedules = [schedule for stages in (1, 2) for schedule in list_published_schedules(stages)]
        programs = [
            (type(schedule).__name__, schedule.program(self.ranks, self.microbatches)) for schedule in schedules
        ]
        fitting = [(name, program) for name, program in programs if self.fits(program) and name in (names or {name})]
        return min(((self.makespan(program), name) for name, program in fitting), default=(float("inf"), "none"))

    def search(self, recomputes: bool = False) -> tuple[Program, Sequence[int]]:
        """Return the program from `Auto`, and the slice count per stage."""
        again, settings = RECOMPUTE if recomputes else {}, {"comm": self.latency, "microbatches": self.microbatches}
        auto = Auto(slices=self.slices, memory=self.memory, recompute=again, **settings)  # type: ignore[arg-type]
        return auto.program(self.ranks, self.microbatches), auto.layers_by_stage(self.ranks, len(self.slices))


def _recompute_fraction(policy: Recompute, size: int, quantity: str, otherwise: float) -> float:
    """Return the recomputed fraction of a stage's forward pass, or the kept fraction of its activations."""
    if policy == "none":
        return otherwise
    blocks = -(-size // policy) / size if isinstance(policy, int) else 1.0
    part: float = getattr(RECOMPUTE["selective" if policy == "selective" else "blocks"], quantity)
    return otherwise + blocks * (part - otherwise)


def cells() -> Iterator[Cell]:
    """Yield all 360 cells."""
    for ranks, rounds, last, latency, memory in product(RANKS, ROUNDS, LAST, LATENCIES, MEMORIES):
        yield Cell(ranks, ranks * rounds, last, latency, memory * ranks)


def main() -> None:
    """Print a row per cell, how often `auto` is worse, its median gain, and the duration of a large search."""
    head = f"{'p':>3}{'m':>5}{'last':>6}{'late':>6}{'memory':>8}{'auto':>9}{'best':>9}{'torch':>9}{'gain':>7}"
    head += f"{'again':>9}{'gain':>7}"
    print(f"{head}  best published")
    worse, gains, gains_by_layers = 0, [], []
    by_memory: dict[float, list[float]] = {memory: [] for memory in MEMORIES}
    for cell in cells():
        schedule = cell.search()
        ours, (best, name), (torch_best, _) = (
            cell.makespan(*schedule),
            cell.best_published(),
            cell.best_published(TORCH_SCHEDULES),
        )
        worse += ours > best * (1 + 1e-9) or not cell.fits(*schedule)
        gain = 1 - ours / best
        recomputing = cell.search(recomputes=True)
        again = cell.makespan(*recomputing)
        worse += again > ours * (1 + 1e-9) or not cell.fits(*recomputing)
        by_memory[cell.memory / cell.ranks].append(1 - again / ours)
        if (cell.last, cell.latency) == (1.3, 0.25) and best < float("inf"):
            gains.append(gain)
            finer = attrs.evolve(cell, parts=8)
            gains_by_layers.append(1 - finer.makespan(*finer.search()) / best)
        settings = f"{cell.ranks:3}{cell.microbatches:5}{cell.last:6}{cell.latency:6}{cell.memory:8}"
        print(
            f"{settings}{ours:9.2f}{best:9.2f}{torch_best:9.2f}{gain:7.1%}{again:9.2f}{1 - again / ours:7.1%}  {name}",
            flush=True,
        )
    print(f"worse than the best published schedule that fits, or with recomputation than without: {worse} cells")
    for memory, parts in by_memory.items():
        count_text = f"{sum(part > 1e-9 for part in parts)} of {len(parts)} cells"
        gain_text = f"median gain {statistics.median(parts):.1%}, up to {max(parts):.1%}"
        print(f"recomputation, memory {memory}: {gain_text}; {count_text}")
    print(f"last 1.3, latency 0.25: median gain {statistics.median(gains):.1%} of {len(gains)} cells")
    print(f"8 layers per share, any number per stage: median gain {statistics.median(gains_by_layers):.1%}")
    began = time.perf_counter()
    cell = Cell(64, 256, 1.3, 0.25, 64)
    schedule = cell.search()
    seconds = time.perf_counter() - began
    cell.search(recomputes=True)
    more = time.perf_counter() - began - seconds
    ours, (best, name) = cell.makespan(*schedule), cell.best_published()
    took = f"found in {seconds:.1f} s, in {more:.1f} s with recomputation"
    print(f"64 ranks, 256 microbatches: {ours:.1f}, {name} {best:.1f}; {took}")


if __name__ == "__main__":
    main()
