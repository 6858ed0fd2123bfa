"""Schedules in all their variants, and oracles without any code of the source."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from drawloom.components.pipeline.program.lowering import lower_to_rank_program
from drawloom.components.pipeline.program.notation import parse_action
from drawloom.components.ports.pipeline import Schedule
from drawloom.components.ports.program import Action, Overlap, Program, RankProgram
from drawloom.graph.registry.registry import Registry

FOLDER = "pipeline.schedules."
CATALOGUE = Registry.from_package("drawloom.components")
NAMES = [name.removeprefix(FOLDER) for name in CATALOGUE.names() if name.startswith(FOLDER)]


def parse_program(text: str) -> Program:
    """Parse a program in `format_program`'s format; ValueError if the text is not a program."""
    rows = [row.partition(":")[2] for row in text.splitlines() if row.strip()]
    return Program.from_rank_programs([[parse_action(word) for word in row.split()] for row in rows])


def format_program(program: Program) -> str:
    """Return a program as text with a row per rank, such as `0: 0F0 0F1 0B0`."""
    return "".join(f"{rank}: {' '.join(map(str, program.rank_program(rank)))}\n" for rank in range(program.ranks))


def schedule(name: str, **settings: Any) -> Schedule:
    """Return a schedule by the last part of its name."""
    made: Schedule = CATALOGUE.require(FOLDER + name).cls(**settings)
    return made


def variants(name: str, max_stages: int = 4) -> Iterator[Schedule]:
    """Yield a schedule with each number of stages on a rank, and each value of its settings."""
    spec = CATALOGUE.require(FOLDER + name)
    if "trials" in spec.fields:
        # A short search, for speed; with little memory no published schedule fits.
        yield from (schedule(name, trials=8, memory=memory) for memory in (None, 1.5))
    elif "stages_per_rank" in spec.fields:
        yield from (schedule(name, stages_per_rank=number) for number in range(1, max_stages + 1))
    elif "hide_latency" in spec.fields:
        yield from (schedule(name, hide_latency=switch) for switch in (False, True))
    else:
        yield schedule(name)


def counts(ranks: int) -> list[int]:
    """Return microbatch counts: few and many, multiples of ranks and not, up to four times the ranks."""
    return sorted({1, 2, ranks - 1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks + 2, 4 * ranks} - {0})


def texts(line: RankProgram) -> list[str]:
    """Return the labels in a rank's program."""
    return [str(item) for item in line]


def parts(line: RankProgram) -> list[Action]:
    """Return the single actions in a rank's program."""
    return [part for item in line for part in (item.parts if isinstance(item, Overlap) else (item,))]


def ends(program: Program, cost: Callable[[str], float], message: float) -> dict[tuple[int, str, int], float]:
    """Return the end of each action, by iterating over the ranks until nothing changes."""
    lines = [parts(program.rank_program(rank)) for rank in range(program.ranks)]
    end_times: dict[tuple[int, str, int], float] = {}
    places, free = [0] * len(lines), [0.0] * len(lines)
    moved = True
    while moved:
        moved = False
        for rank, line in enumerate(lines):
            while places[rank] < len(line):
                action = line[places[rank]]
                ready = _ready(program, end_times, action, message)
                if ready is None:
                    break
                free[rank] = max(free[rank], ready) + cost(action.op)
                end_times[action.stage, action.op, action.microbatch] = free[rank]
                places[rank] += 1
                moved = True
    assert places == [len(line) for line in lines], "deadlock"
    return end_times


def _ready(program: Program, end_times: dict[Any, float], action: Action, message: float) -> float | None:
    last = program.stages - 1
    stage, microbatch = action.stage, action.microbatch
    if action.op == "W":
        return end_times.get((stage, "I", microbatch))
    source = stage - 1 if action.op == "F" else stage if stage == last else stage + 1
    if source < 0:
        return 0.0
    works = ("F",) if action.op == "F" or stage == last else ("B", "I")
    hop = message if program.stage_to_rank[source] != program.stage_to_rank[stage] else 0.0
    return next((end_times[source, w, microbatch] + hop for w in works if (source, w, microbatch) in end_times), None)


def rendezvous(lines: Sequence[RankProgram]) -> None:
    """
    Execute programs without buffering: a rank waits in a send until its neighbour is at the matching receive.

    Fail if this never happens, or if work would start without its inputs.
    """
    left = [parts(line) for line in lines]
    arrived: set[tuple[int, str, int]] = set()
    while any(left):
        heads = [line[0] if line else None for line in left]
        going = {rank for rank, head in enumerate(heads) if head and head.peer is None}
        for rank, head in enumerate(heads):
            if head and head.peer is not None and head.op.startswith("SEND"):
                peer_action = heads[head.peer]
                if peer_action and peer_action.peer == rank and peer_action.op.startswith("RECV"):
                    step = 1 if head.op == "SEND_F" else -1
                    wanted = (head.stage + step, head.op.replace("SEND", "RECV"), head.microbatch)
                    assert (peer_action.stage, peer_action.op, peer_action.microbatch) == wanted, (
                        f"{head} meets {peer_action}"
                    )
                    arrived.add(wanted)
                    going |= {rank, head.peer}
        assert going, f"deadlock at {[str(head) for head in heads]}"
        for rank in going:
            left[rank].pop(0)


def golden(name: str) -> str:
    """Return a schedule's golden text: each rank's program at some sizes, and lowered at a small size."""
    text = ""
    for ranks, microbatches in ((4, 8), (2, 5), (3, 2)):
        text += f"# {ranks} ranks, {microbatches} microbatches\n"
        text += format_program(schedule(name).program(ranks, microbatches)) + "\n"
    text += "# 2 ranks, 3 microbatches, with messages\n"
    program = schedule(name).program(2, 3)
    return text + "".join(f"{rank}: {' '.join(texts(lower_to_rank_program(program, rank)))}\n" for rank in range(2))
