"""The proof of a component or a recipe: its contracts, and its runs on meshes compared with one process."""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import torch

from drawloom.components.checkpoint.manifest import FOLDER as CHECKPOINTS
from drawloom.components.proving.cases import ONE, Case, list_cases, make_narrow
from drawloom.components.proving.compare import (
    Compared,
    Difference,
    Key,
    find_first_difference,
    measure_errors,
)
from drawloom.components.proving.contracts import check_contracts
from drawloom.components.proving.ranks import RankPool, RanksFailedError
from drawloom.components.proving.recorder import RankRecord
from drawloom.components.proving.result import ProvedDifference, ProveResult
from drawloom.components.proving.run import RecordedRun, RefusedError, Source, run_and_record
from drawloom.components.proving.smallest import STEPS, list_smaller_values, merge_values
from drawloom.components.proving.subject import Subject
from drawloom.graph.problems import RecipeError, UserError
from drawloom.graph.project import Recipe

TOLERANCE = 1e-9
"""Relative error of float64 values, besides the error that rounding gradients causes."""
NOISE = 1e-14
"""Relative change of gradients that shows how much a run amplifies rounding."""
AMPLIFICATION = 100.0
"""Tolerated multiple of the errors from noise, since ranks also round in forward passes."""
NARROW_FACTOR = 4.0
"""Tolerated multiple of the error of one process in bfloat16."""
MIN_NARROW_ERROR = 0.02
TIMEOUT = 120.0
SAVED = STEPS // 2


@attrs.frozen
class Failure:
    """A case with other numbers than one process, or with a crash, and the text of the smallest failing recipe."""

    case: Case
    difference: Difference | None
    crash: str = ""
    recipe: str = ""


class _FailedError(Exception):
    """The end of a proof with a failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure


@attrs.define(eq=False, slots=False)
class Prover:
    """
    Runner of proofs, whose processes stay alive until `close`.

    `on_progress` is called with the number of done and of all cases, and the next case's name.
    """

    on_progress: Callable[[int, int, str], object] = lambda done, total, name: None
    _pools: dict[int, RankPool] = attrs.field(init=False, factory=dict)

    def __enter__(self) -> "Prover":
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def prove(
        self,
        subject: Subject,
        budget: float | None = None,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> ProveResult:
        """Check the contracts of nodes, and compare runs with one process; no case begins after `budget` seconds."""
        with tempfile.TemporaryDirectory(prefix="prove-") as folder:
            source, values, nodes = subject.make_source_values_and_nodes(Path(folder) / "input")
            return _OneProof(self, source, values, Path(folder), within, budget).run(subject.name, nodes)

    def call(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in `ranks` processes."""
        return self._pools.setdefault(ranks, RankPool(ranks)).call(function, *arguments, timeout=TIMEOUT)


@attrs.define(eq=False, slots=False)
class _OneProof:
    """One proof: its recipe, its folder, and what was compared so far."""

    prover: Prover
    source: Source
    values: dict[str, Any]
    folder: Path
    within: Callable[[], AbstractContextManager[object]]
    budget: float | None
    tolerance: float = TOLERANCE
    start: float = attrs.field(factory=time.monotonic)
    equal: list[str] = attrs.field(factory=list)
    refused: dict[str, str] = attrs.field(factory=dict)
    uncompared: set[str] = attrs.field(factory=set)

    def run(self, subject: str, nodes: Sequence[str]) -> ProveResult:
        """Return the result for a subject, whose `nodes` have contracts to keep."""
        contracts: list[str] = []
        broken, failure = "", None
        recipe = self.source.load(self.values)
        recipe.check(skip_machine_checks=True)
        cases = list_cases(recipe)
        untried: list[str] = []
        for node in nodes:
            self.prover.on_progress(0, len(cases), f"contracts of [{node}]")
            [(checked, broken)] = self.prover.call(
                1, check_contracts, self.source, self.values, node, self.folder / "contracts" / node
            )
            contracts += checked
            if broken:
                break
        try:
            untried = [case.name for case in cases] if broken else self._compare_cases(recipe, cases)
        except _FailedError as failed:
            failure = self._find_smallest(failed.failure)
            untried = [case.name for case in cases if case.name not in {*self.equal, *self.refused, failure.case.name}]
        found = failure and failure.difference
        return ProveResult(
            subject=subject,
            contracts=contracts,
            broken_contract=broken,
            equal=self.equal,
            failed=failure.case.name if failure else "",
            difference=ProvedDifference(**attrs.asdict(found)) if found else None,
            crash=failure.crash if failure else "",
            refused=self.refused,
            untried=untried,
            uncompared=sorted(self.uncompared),
            recipe=failure.recipe if failure else "",
            path=None,
            seconds=time.monotonic() - self.start,
        )

    def _compare_cases(self, recipe: Recipe, cases: Sequence[Case]) -> list[str]:
        """Compare the cases with one process, and return the names of those for which the time is too short."""
        self.prover.on_progress(0, len(cases), "one process")
        one = self.one
        self._compare_second_run_and_resume(one)
        for done, case in enumerate(cases):
            if self.budget is not None and time.monotonic() - self.start > self.budget:
                return [case.name for case in cases[done:]]
            self.prover.on_progress(done, len(cases), case.name)
            if reason := case.find_refusal(recipe):
                self.refused[case.name] = reason
            elif case.resumed in self.refused:
                self.refused[case.name] = self.refused[case.resumed]
            else:
                self._compare_case(case)
        return []

    @cached_property
    def one(self) -> RankRecord:
        """The record of one process."""
        try:
            return self._record(ONE)[0]
        except RanksFailedError as error:
            if error.last_line.startswith(REFUSED):
                text = error.last_line.removeprefix(REFUSED)
                raise UserError(f"the smallest recipe is refused: {text}", 2) from error
            raise _FailedError(Failure(ONE, None, str(error))) from error

    @cached_property
    def errors_by_noise(self) -> dict[Key, float]:
        """Errors after a change of gradients in the last bits."""
        return measure_errors(self.one, self._record(NOISY, noise=NOISE))

    @cached_property
    def narrow_errors(self) -> dict[Key, float]:
        """Errors of one process in bfloat16, in the first step."""
        narrow = make_narrow(ONE, self.source.load(self.values).graph)
        return measure_errors(self._select_steps(1, 1), self._record(narrow))

    def _compare_second_run_and_resume(self, one: RankRecord) -> None:
        """Compare one process with itself, and with a run that was left after a checkpoint and resumed, bit by bit."""
        second = self._record(AGAIN)
        self.uncompared |= {name for (_, _, name), error in measure_errors(one, second).items() if error}
        numbers = {name for snapshot in one.snapshots for name in snapshot.numbers}
        if self.uncompared - numbers:
            self._compare(AGAIN, one, second, lambda value: math.inf if value.kind == "number" else 0.0)
        later = self._select_steps(SAVED + 1, STEPS)
        self._compare(
            RESUMED, later, self._record(RESUMED), lambda value: math.inf if value.key[2] in self.uncompared else 0.0
        )

    def _compare_case(self, case: Case) -> None:
        """Compare a case with one process, up to rounding."""
        try:
            ranks = self._record(case)
        except RanksFailedError as error:
            if not error.last_line.startswith(REFUSED):
                raise _FailedError(Failure(case, None, str(error))) from error
            self.refused[case.name] = f"at the start: {error.last_line.removeprefix(REFUSED)}"
            return
        steps = (1, 1) if case.is_narrow else (SAVED + 1, STEPS) if case.resumed else (1, STEPS)
        self._compare(
            case,
            self._select_steps(*steps),
            ranks,
            self._get_narrow_tolerance if case.is_narrow else self._get_tolerance,
        )

    def _find_smallest(self, failure: Failure) -> Failure:
        """Return the failure with the smallest recipe that still fails, and with its text."""
        values, case, difference = {**self.values}, failure.case, failure.difference
        if difference is not None and not (case.resumed or case.is_narrow):
            tolerance = max(TOLERANCE, difference.error / 10)
            for smaller in list_smaller_values(self.source.load(self.values), difference.step):
                tried = attrs.evolve(self, values=merge_values(values, smaller), equal=[], tolerance=tolerance)
                with suppress(RanksFailedError, RecipeError, UserError):
                    recipe = self.source.load(tried.values)
                    recipe.check(skip_machine_checks=True)
                    if not case.find_refusal(recipe):
                        self.prover.on_progress(0, 1, "the smallest failing recipe")
                        tried.errors_by_noise = {}  # one run less
                        try:
                            tried._compare_case(case)
                        except _FailedError as smallest:
                            if smallest.failure.difference is not None:
                                values, failure = tried.values, smallest.failure
        comment = f"{case.name}: {failure.difference}" if failure.difference else case.name
        text = self.source.format_with(merge_values(values, case.values), comment)
        return attrs.evolve(failure, recipe=text)

    def _select_steps(self, first: int, last: int) -> RankRecord:
        """Return the record of one process with the snapshots of some steps, and with exports after the last step."""
        snapshots = [snapshot for snapshot in self.one.snapshots if first <= snapshot.step <= last]
        return attrs.evolve(self.one, snapshots=snapshots, exported=self.one.exported if last == STEPS else {})

    def _get_tolerance(self, value: Compared) -> float:
        if value.key[2] in self.uncompared:
            return math.inf
        rounding = torch.finfo(value.expected.dtype).eps if value.expected.dtype.is_floating_point else 0.0
        return self.tolerance + AMPLIFICATION * (rounding + self.errors_by_noise.get(value.key, 0.0))

    def _get_narrow_tolerance(self, value: Compared) -> float:
        if value.key[2] in self.uncompared:
            return math.inf
        return max(MIN_NARROW_ERROR, NARROW_FACTOR * self.narrow_errors.get(value.key, 0.0))

    def _compare(
        self, case: Case, one: RankRecord, ranks: Sequence[RankRecord], get_tolerance: Callable[[Compared], float]
    ) -> None:
        """Raise _FailedError unless a case has one process's values."""
        if difference := find_first_difference(one, ranks, case.sizes, get_tolerance):
            raise _FailedError(Failure(case, difference))
        self.equal.append(case.name)

    def _record(self, case: Case, noise: float = 0.0) -> list[RankRecord]:
        """Run a case in its own folder, and return the records by rank."""
        values, target = merge_values(self.values, case.values), self.folder / case.name
        checkpoint = self.folder / case.resumed / CHECKPOINTS / f"step-{SAVED}" if case.resumed else None
        shutil.rmtree(target, ignore_errors=True)  # of the same case with a larger recipe
        last = 1 if case.is_narrow else STEPS
        run = RecordedRun(self.source, values, target, last, checkpoint, noise, self.within)
        return self.prover.call(case.ranks, run_and_record, run)


REFUSED = f"{RefusedError.__module__}.{RefusedError.__qualname__}: "
NOISY = Case("one process with noise", 1, {})
AGAIN = Case("one process again", 1, {})
RESUMED = Case("one process, resumed", 1, {}, resumed=ONE.name)
