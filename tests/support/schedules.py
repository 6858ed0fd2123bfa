"""Schedules in all their variants, and oracles that share no code with the source."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from drawloom.components.pipeline.program.lowering import lower
from drawloom.components.pipeline.program.notation import write_program
from drawloom.components.ports.pipeline import Schedule
from drawloom.components.ports.program import Action, Overlap, Program, RankProgram
from drawloom.graph.problems import Problem
from drawloom.graph.registry.registry import Registry

FOLDER = "pipeline.schedules."
CATALOGUE = Registry.of("drawloom.components")
NAMES = [name.removeprefix(FOLDER) for name in CATALOGUE.names() if name.startswith(FOLDER)]


def schedule(name: str, **settings: Any) -> Schedule:
    """A schedule by the last part of its name."""
    spec = CATALOGUE.find(FOLDER + name)
    assert not isinstance(spec, Problem), spec
    made: Schedule = spec.cls(**settings)
    return made


def variants(name: str, most: int = 4) -> Iterator[Schedule]:
    """A schedule with each number of stages on a rank, and each value of its settings."""
    spec = CATALOGUE.find(FOLDER + name)
    assert not isinstance(spec, Problem), spec
    if "trials" in spec.fields:
        # A short search, for speed; with little memory no published schedule fits.
        yield from (schedule(name, trials=8, memory=memory) for memory in (None, 1.5))
    elif "stages_per_rank" in spec.fields:
        yield from (schedule(name, stages_per_rank=number) for number in range(1, most + 1))
    elif "hide_latency" in spec.fields:
        yield from (schedule(name, hide_latency=switch) for switch in (False, True))
    else:
        yield schedule(name)


def counts(ranks: int) -> list[int]:
    """Numbers of microbatches: few and many, multiples of ranks and not, up to four times as many as ranks."""
    return sorted({1, 2, ranks - 1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks + 2, 4 * ranks} - {0})


def texts(line: RankProgram) -> list[str]:
    """The labels of a rank's program."""
    return [str(item) for item in line]


def parts(line: RankProgram) -> list[Action]:
    """The single actions of a rank's program."""
    return [part for item in line for part in (item.parts if isinstance(item, Overlap) else (item,))]


def ends(program: Program, cost: Callable[[str], float], message: float) -> dict[tuple[int, str, int], float]:
    """The end of each action, by iterating over the ranks until nothing changes."""
    lines = [parts(program.rank_program(rank)) for rank in range(program.ranks)]
    found: dict[tuple[int, str, int], float] = {}
    places, free = [0] * len(lines), [0.0] * len(lines)
    moved = True
    while moved:
        moved = False
        for rank, line in enumerate(lines):
            while places[rank] < len(line):
                action = line[places[rank]]
                ready = _ready(program, found, action, message)
                if ready is None:
                    break
                free[rank] = max(free[rank], ready) + cost(action.op)
                found[action.stage, action.op, action.microbatch] = free[rank]
                places[rank] += 1
                moved = True
    assert places == [len(line) for line in lines], "deadlock"
    return found


def _ready(program: Program, found: dict[Any, float], action: Action, message: float) -> float | None:
    last = program.stages - 1
    stage, microbatch = action.stage, action.microbatch
    if action.op == "W":
        return found.get((stage, "I", microbatch))
    source = stage - 1 if action.op == "F" else stage if stage == last else stage + 1
    if source < 0:
        return 0.0
    works = ("F",) if action.op == "F" or stage == last else ("B", "I")
    hop = message if program.stage_to_rank[source] != program.stage_to_rank[stage] else 0.0
    return next((found[source, w, microbatch] + hop for w in works if (source, w, microbatch) in found), None)


def rendezvous(lines: Sequence[RankProgram]) -> None:
    """
    Carry lines out with no buffering at all: a rank waits in a send until its neighbour stands in that very receive.

    Fails if that never happens, or if work would start without what it needs.
    """
    left = [parts(line) for line in lines]
    arrived: set[tuple[int, str, int]] = set()
    while any(left):
        heads = [line[0] if line else None for line in left]
        going = {rank for rank, head in enumerate(heads) if head and head.peer is None}
        for rank, head in enumerate(heads):
            if head and head.peer is not None and head.op.startswith("SEND"):
                other = heads[head.peer]
                if other and other.peer == rank and other.op.startswith("RECV"):
                    step = 1 if head.op == "SEND_F" else -1
                    wanted = (head.stage + step, head.op.replace("SEND", "RECV"), head.microbatch)
                    assert (other.stage, other.op, other.microbatch) == wanted, f"{head} meets {other}"
                    arrived.add(wanted)
                    going |= {rank, head.peer}
        assert going, f"deadlock at {[str(head) for head in heads]}"
        for rank in going:
            left[rank].pop(0)


def golden(name: str) -> str:
    """The golden text of a schedule: each rank's program at some sizes, and lowered at a small one."""
    text = ""
    for ranks, microbatches in ((4, 8), (2, 5), (3, 2)):
        text += f"# {ranks} ranks, {microbatches} microbatches\n"
        text += write_program(schedule(name).program(ranks, microbatches)) + "\n"
    text += "# 2 ranks, 3 microbatches, with messages\n"
    program = schedule(name).program(2, 3)
    return text + "".join(f"{rank}: {' '.join(texts(lower(program, rank)))}\n" for rank in range(2))
