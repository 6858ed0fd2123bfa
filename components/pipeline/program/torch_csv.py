"""
Programs in the CSV format of `torch.distributed.pipelining`: a row for each rank, an action in each cell.

An overlap is `(3F7;4B2)OVERLAP_F_B`. Empty cells, sends and receives, and what concerns sharded weights (UNSHARD,
RESHARD, REDUCE_GRAD) are passed over when reading: a program is what ranks compute, and messages are put in anew.
"""

import csv
import io
import re

from drawloom.components.pipeline.program.notation import read_action
from drawloom.components.ports.program import OPS, Action, Overlap, Program, RankProgram

OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
ASIDE = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def read_csv(text: str) -> Program:
    """The program in a CSV text; a ValueError that names the cell if there is none."""
    rows = list(csv.reader(io.StringIO(text)))
    return Program.of([_line(cells, row) for row, cells in enumerate(rows, 1) if cells])


def write_csv(program: Program) -> str:
    """The CSV text of a program, as torch reads and writes it."""
    text = io.StringIO()
    csv.writer(text).writerows([_cell(item) for item in program.line(rank)] for rank in range(program.ranks))
    return text.getvalue()


def _line(cells: list[str], row: int) -> RankProgram:
    line: RankProgram = []
    for column, cell in enumerate(cells, 1):
        try:
            item = _read(cell.strip())
        except ValueError as error:
            raise ValueError(f"row {row}, column {column}: {error}") from None
        line += [] if item is None else [item]
    return line


def _read(cell: str) -> Action | Overlap | None:
    if not cell or ASIDE.fullmatch(cell):
        return None
    overlap = OVERLAP.fullmatch(cell)
    item = read_action(overlap[1].replace(";", "|") if overlap else cell)
    return item if isinstance(item, Overlap) or item.op in OPS else None


def _cell(item: Action | Overlap) -> str:
    return f"({';'.join(map(str, item.parts))})OVERLAP_F_B" if isinstance(item, Overlap) else str(item)
