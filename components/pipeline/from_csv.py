"""
Schedule from a CSV file, for example written by hand or by a solver.

The format belongs to `torch.distributed.pipelining`: a row per rank, and an action such as 3F7 in every cell (stage; F,
B, I or W; microbatch). The file determines the rank count, the microbatch count, and the stages' ranks. Violated rules
of schedules are reported as sentences.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from drawloom import NodeView, Problem, UserError, component, internal, setting
from drawloom.components.pipeline.program.notation import is_first_cell_an_action, parse_program_csv
from drawloom.components.pipeline.program.timing import Costs, DeadlockError, compute_timing
from drawloom.components.storage.durable_files import read_file
from drawloom.ports import FORWARD, Program, iterate_actions

TRAINS = ("FB", "FIW")
INFERS = ("F",)


def find_violations(program: Program) -> list[str]:
    """
    Return a program's violations, or an empty list if it is valid.

    For every microbatch, a stage runs one forward pass and then one backward pass, whole or split into I and W, on the
    stage's rank; or the whole program consists of forward passes. The program must not deadlock.
    """
    return [*_find_wrong_ranks(program), *_find_missing_or_repeated_passes(program)] or _find_deadlocks(program)


def _find_wrong_ranks(program: Program) -> Iterator[str]:
    """Yield a sentence for every action outside the stages, or on another rank than its stage."""
    for rank in range(program.ranks):
        for action in iterate_actions(program.rank_program(rank)):
            if not 0 <= action.stage < program.stages:
                yield f"{action} on rank {rank}: there are stages 0 to {program.stages - 1}"
            elif program.stage_to_rank[action.stage] != rank:
                yield f"{action} is on rank {rank}, but its stage belongs to rank {program.stage_to_rank[action.stage]}"


def _find_missing_or_repeated_passes(program: Program) -> Iterator[str]:
    """Yield a sentence for every stage and microbatch without exactly its passes, in order."""
    done = dict.fromkeys(product(range(program.stages), range(program.microbatches)), "")
    for rank in range(program.ranks):
        for action in iterate_actions(program.rank_program(rank)):
            key = action.stage, action.microbatch
            done[key] = done.get(key, "") + action.op
    allowed = TRAINS if any(ops.strip("F") for ops in done.values()) else INFERS
    for (stage, microbatch), ops in done.items():
        if ops not in allowed:
            yield f"stage {stage} does {ops or 'nothing'} for microbatch {microbatch}, not {' or '.join(allowed)}"


def _find_deadlocks(program: Program) -> list[str]:
    try:
        compute_timing(program, Costs())
    except DeadlockError as deadlock:
        return [str(deadlock)]
    return []


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
        content = read_file(path.resolve(), MAX_TABLE_BYTES)
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
