"""Text formats for actions, like `3F7`, and `torch.distributed.pipelining`'s CSV format for programs."""

import csv
import io
import re

from drawloom.ports import OPS, Action, Overlap, Program, RankProgram, iterate_actions

ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")


def parse_action(text: str) -> Action | Overlap:
    """Parse an action's or an overlap's label; ValueError if it is neither."""
    parts = tuple(_parse_single_action(part) for part in text.split("|"))
    return parts[0] if len(parts) == 1 else Overlap(parts)


def _parse_single_action(text: str) -> Action:
    match = ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action; write such as 3F7: stage, op (F, B, I or W) and microbatch")
    return Action(int(match[1]), match[2], int(match[3]))  # type: ignore[arg-type]


OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
# torch's actions for FSDP, and its waits for reductions and messages, which programs here do not schedule.
IGNORED_ACTION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_SCATTER|REDUCE_GRAD|OFFLOAD|RELOAD|WAIT_\w+?)\d*")


def parse_program_csv(text: str) -> Program:
    """Parse a program in torch's CSV format; ValueError with the cell if the text is not a program."""
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(str(error)) from error
    lines = [_parse_csv_row(cells, row) for row, cells in enumerate(rows, 1) if cells]
    _check_enough_actions(lines)
    return Program.from_rank_programs(lines)


def _check_enough_actions(rank_programs: list[RankProgram]) -> None:
    """Raise ValueError if there are far too few actions for the stages and microbatches, whose product is allocated."""
    parts = [part for line in rank_programs for part in iterate_actions(line)]
    stages = 1 + max((part.stage for part in parts), default=0)
    microbatches = 1 + max((part.microbatch for part in parts), default=0)
    if stages * microbatches > 1000 + 2 * len(parts):
        raise ValueError(f"{len(parts)} actions are too few for {microbatches} microbatches on {stages} stages")


def is_first_cell_an_action(text: str) -> bool:
    """Return whether the first non-empty cell is an action: a schedule then, even with wrong cells later."""
    first = text.lstrip(", \t\r\n").partition("\n")[0].partition(",")[0]
    try:
        return bool(_parse_cell(first.strip()))
    except ValueError:
        return False


def format_program_csv(program: Program) -> str:
    """Return a program in torch's CSV format."""
    text = io.StringIO()
    csv.writer(text).writerows(
        [_format_cell(item) for item in program.rank_program(rank)] for rank in range(program.ranks)
    )
    return text.getvalue()


def _parse_csv_row(cells: list[str], row: int) -> RankProgram:
    """Parse a rank's CSV cells; ValueError with row and column for a wrong cell."""
    line: RankProgram = []
    for column, cell in enumerate(cells, 1):
        try:
            item = _parse_cell(cell.strip())
        except ValueError as error:
            raise ValueError(f"row {row}, column {column}: {error}") from None
        line += [] if item is None else [item]
    return line


def _parse_cell(cell: str) -> Action | Overlap | None:
    """Parse a CSV cell; None for an empty cell, a message, or an action on shards."""
    # Messages are skipped below, because lowering inserts them.
    if not cell or IGNORED_ACTION.fullmatch(cell):
        return None
    overlap = OVERLAP.fullmatch(cell)
    item = parse_action(overlap[1].replace(";", "|") if overlap else cell)
    return item if isinstance(item, Overlap) or item.op in OPS else None


def _format_cell(item: Action | Overlap) -> str:
    return f"({';'.join(map(str, item.parts))})OVERLAP_F_B" if isinstance(item, Overlap) else str(item)
