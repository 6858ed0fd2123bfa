"""Programs as text: `3F7` for an action, `3F7|4B2` for an overlap, a row for each rank."""

import re

from drawloom.components.ports.program import Action, Overlap, Program, RankProgram

ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")


def read_action(text: str) -> Action | Overlap:
    """An action or an overlap; a ValueError if it is neither."""
    parts = tuple(_read_part(part) for part in text.split("|"))
    return parts[0] if len(parts) == 1 else Overlap(parts)


def _read_part(text: str) -> Action:
    found = ACTION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no action; write such as 3F7: stage, work (F, B, I or W) and microbatch")
    return Action(int(found[1]), found[2], int(found[3]))  # type: ignore[arg-type]


def read_program(text: str) -> Program:
    """What `write_program` gave; a ValueError if it is no program."""
    return Program.of([_read_line(row.partition(":")[2]) for row in text.splitlines() if row.strip()])


def _read_line(text: str) -> RankProgram:
    return [read_action(word) for word in text.split()]


def write_program(program: Program) -> str:
    """A row for each rank, such as `0: 0F0 0F1 0B0`."""
    return "".join(f"{rank}: {' '.join(map(str, program.line(rank)))}\n" for rank in range(program.ranks))
