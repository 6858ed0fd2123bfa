"""
Schedule from a CSV file, for example written by hand or by a solver.

The format belongs to `torch.distributed.pipelining`: a row per rank, and an action such as 3F7 in every cell (stage; F,
B, I or W; microbatch). The file determines the rank count, the microbatch count, and the stages' ranks.
"""

from collections.abc import Iterator
from pathlib import Path

from drawloom import NodeView, Problem, UserError, component, internal, setting
from drawloom.components.pipeline.program.notation import is_first_cell_an_action, parse_program_csv
from drawloom.components.pipeline.program.validity import find_violations
from drawloom.components.storage import regular_file
from drawloom.ports import FORWARD, Program

MAX_TABLE_BYTES = 2**24
"""Size limit of a table, about two million actions."""


@component(impact="safe")
class FromCsv:
    """Schedule in a CSV file, in torch.distributed.pipelining's format."""

    path: Path = setting("the CSV file")
    _program: Program | None = internal(None)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield a problem if the file can't be read or its program is not valid."""
        try:
            read_program_file(node.settings["path"])
        except UserError as error:
            yield node.problem("path", str(error))

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """Return the stages' ranks; UserError if the file is for another rank count."""
        program = self._read_once()
        if program.ranks != ranks:
            raise UserError(f"{self.path} is a schedule for {program.ranks} ranks, not {ranks}")
        return program.stage_to_rank

    def program(self, ranks: int, microbatches: int) -> Program:
        """Return the program in the file; UserError if it is for another rank or microbatch count."""
        self.stage_to_rank(ranks)
        program = self._read_once()
        if program.microbatches != microbatches:
            text = f"{self.path} is a schedule for {program.microbatches} microbatches, not {microbatches}"
            raise UserError(f"{text}; change the batch's global_size or micro_size, or the file")
        return program

    def _read_once(self) -> Program:
        if self._program is None:
            self._program = read_program_file(self.path)
        return self._program


def read_program_file(path: Path) -> Program:
    """Return the program in a CSV file; UserError if it can't be read or is not valid."""
    try:
        content = regular_file.read_file(path.resolve(), MAX_TABLE_BYTES)
        text = content.decode("utf-8-sig")  # spreadsheets write a byte order mark
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error
    except ValueError:
        raise UserError(f"{path} is not a valid schedule: it is not a table of actions such as 3F7") from None
    try:
        program = parse_program_csv(text)
    except ValueError as error:
        # The path may be that of any file, whose content must not appear in a message.
        why = str(error) if is_first_cell_an_action(text) else "it is not a table of actions such as 3F7"
        raise UserError(f"{path} is not a valid schedule: {why}") from None
    problems = find_violations(program)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"{path} is not a valid schedule: {problems[0]}{more}")
    # The mesh and the layer partition assume the same number of stages on every rank.
    if len({program.stage_to_rank.count(rank) for rank in range(program.ranks)}) != 1:
        raise UserError(f"{path} is not a valid schedule: its {program.ranks} ranks hold different numbers of stages")
    if not (program.op != FORWARD).any():
        raise UserError(f"{path} has forward passes only, and trains nothing; add backward passes")
    return program
