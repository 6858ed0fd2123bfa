"""
A table: the program that a file holds, such as one that somebody worked out by hand or by solver.

The file is CSV, as `torch.distributed.pipelining` reads and writes it: a row for each rank, an action such as 3F7 in
each cell (stage, F, B, I or W, microbatch). It says how many ranks and microbatches there are, and whose a stage is.
"""

from collections.abc import Iterator
from pathlib import Path

import attrs

from drawloom.components.pipeline.program.notation import read_csv
from drawloom.components.pipeline.program.validity import faults
from drawloom.components.ports.program import Program
from drawloom.graph import UserError, component, setting
from drawloom.graph.build.node import NodeView
from drawloom.graph.problems import Problem


@component(impact="safe")
class Table:
    """What a CSV file says, in the format of torch.distributed.pipelining."""

    path: Path = setting(doc="the CSV file")
    _program: Program | None = attrs.field(init=False, default=None)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """What is wrong with the file."""
        try:
            _read(node.settings["path"])
        except UserError as error:
            yield node.problem("path", str(error))

    @property
    def stages_per_rank(self) -> int:
        """How many stages each rank holds in the file."""
        program = self._read()
        return program.stages // program.ranks

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """For each stage the rank that holds it; a UserError if the file is for another number of ranks."""
        program = self._read()
        if program.ranks != ranks:
            raise UserError(f"{self.path} is a schedule for {program.ranks} ranks, not {ranks}")
        return program.stage_to_rank

    def program(self, ranks: int, microbatches: int) -> Program:
        """What the file says; a UserError if that is for another number of ranks or microbatches."""
        self.stage_to_rank(ranks)
        program = self._read()
        if program.microbatches != microbatches:
            text = f"{self.path} is a schedule for {program.microbatches} microbatches, not {microbatches}"
            raise UserError(f"{text}; the batch says how many there are")
        return program

    def _read(self) -> Program:
        if self._program is None:
            self._program = _read(self.path)
        return self._program


def _read(path: Path) -> Program:
    try:
        program = read_csv(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is no schedule: {error}") from error
    found = faults(program)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(f"{path} is no schedule: {found[0]}{more}")
    if len({program.stage_to_rank.count(rank) for rank in range(program.ranks)}) != 1:
        raise UserError(f"{path} is no schedule: its {program.ranks} ranks hold different numbers of stages")
    return program
