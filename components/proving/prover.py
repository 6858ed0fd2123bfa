"""The proof of a component or a recipe: its contracts, and its runs on meshes compared with one process."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.checkpoint.manifest import FOLDER as CHECKPOINTS
from drawloom.components.proving.cases import Case, list_cases
from drawloom.components.proving.compare import (
    Difference,
    Key,
    find_first_difference,
    measure_errors,
)
from drawloom.components.proving.contracts import check_contracts
from drawloom.components.proving.ranks import RankPool, RanksFailedError
from drawloom.components.proving.recorder import RankRecord
from drawloom.components.proving.run import RecordedRun, RefusedError, Source, Values, run_and_record
from drawloom.components.proving.smallest import STEPS
from drawloom.graph.problems import UserError
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
    """A case with other numbers than one process, or with a crash, and the words for the smallest failing recipe."""

    case: Case
    difference: Difference | None
    crash: str = ""


@attrs.frozen
class Proof:
    """
    What a proof has shown: the checked contracts, the cases with equal numbers, and the first failure.

    `refused` has reasons by case. `uncompared` are values that differ between two runs of one process.
    """

    contracts: Sequence[str]
    broken_contract: str
    equal: Sequence[str]
    refused: Mapping[str, str]
    untried: Sequence[str]
    uncompared: Sequence[str]
    failure: Failure | None
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether nothing was wrong."""
        return not self.broken_contract and self.failure is None


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
        source: Source,
        values: Values,
        nodes: Sequence[str],
        budget: float | None = None,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Proof:
        """Check the contracts of `nodes`, and compare runs, for at most `budget` seconds after the first cases."""
        with tempfile.TemporaryDirectory(prefix="prove-") as folder:
            proof = _OneProof(self, source, values, Path(folder), within, budget)
            return proof.run(nodes)

    def call(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in `ranks` processes."""
        return self._pools.setdefault(ranks, RankPool(ranks)).call(function, *arguments, timeout=TIMEOUT)


@attrs.define(eq=False, slots=False)
class _OneProof:
    """One proof: its recipe, its folder, and what was compared so far."""

    prover: Prover
    source: Source
    values: Values
    folder: Path
    within: Callable[[], AbstractContextManager[object]]
    budget: float | None
    start: float = attrs.field(factory=time.monotonic)
    equal: list[str] = attrs.field(factory=list)
    refused: dict[str, str] = attrs.field(factory=dict)
    uncompared: set[str] = attrs.field(factory=set)
    numbers: Iterator[int] = attrs.field(factory=count)

    def run(self, nodes: Sequence[str]) -> Proof:
        """Return the proof."""
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
            failure = failed.failure
            untried = [case.name for case in cases if case.name not in {*self.equal, *self.refused, failure.case.name}]
        return Proof(
            contracts=contracts,
            broken_contract=broken,
            equal=self.equal,
            refused=self.refused,
            untried=untried,
            uncompared=sorted(self.uncompared),
            failure=failure,
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
            else:
                self._compare_case(case)
        return []

    @cached_property
    def one(self) -> RankRecord:
        """The record of one process."""
        try:
            return self._record(ONE)[0]
        except RanksFailedError as error:
            raise UserError(f"the recipe does not run in one process: {_find_last_line(error)}", 2) from error

    @cached_property
    def errors_by_noise(self) -> dict[Key, float]:
        """Errors after a change of gradients in the last bits."""
        return measure_errors(self.one, self._record(ONE, noise=NOISE))

    def _compare_second_run_and_resume(self, one: RankRecord) -> None:
        """Compare one process with itself, and with a run that was left after a checkpoint and resumed, bit by bit."""
        self.uncompared |= {name for (_, _, name), error in measure_errors(one, self._record(ONE)).items() if error}
        shown = {name for snapshot in one.snapshots for name in snapshot.numbers}
        again = Case("the same run again", 1, {})
        if self.uncompared - shown:
            self._compare(again, one, self._record(ONE), lambda key: 0.0 if key[2] not in shown else float("inf"))
        resumed = Case("a resume from a checkpoint", 1, {})
        self._compare(resumed, one, self._record(resumed, checkpoint=self._one_checkpoint), self._get_exact_tolerance)

    def _get_exact_tolerance(self, key: Key) -> float:
        return float("inf") if key[2] in self.uncompared else 0.0

    def _get_tolerance(self, key: Key) -> float:
        if key[2] in self.uncompared:
            return float("inf")
        return TOLERANCE + AMPLIFICATION * self.errors_by_noise.get(key, 0.0)

    @property
    def _one_checkpoint(self) -> Path:
        return self.folder / ONE.name / CHECKPOINTS / f"step-{SAVED}"

    def _compare_case(self, case: Case) -> None:
        """Compare a case with one process; on a mesh of one dimension also checkpoints that change the mesh."""
        ranks = self._record(case)
        self._compare(case, self.one, ranks, self._get_tolerance)

    def _compare(
        self, case: Case, one: RankRecord, ranks: Sequence[RankRecord], get_tolerance: Callable[[Key], float]
    ) -> None:
        """Raise _FailedError unless a case has one process's values."""
        first = ranks[0].snapshots[0].step
        later = attrs.evolve(one, snapshots=[snapshot for snapshot in one.snapshots if snapshot.step >= first])
        if difference := find_first_difference(later, ranks, case.sizes, get_tolerance):
            raise _FailedError(Failure(case, difference))
        self.equal.append(case.name)

    def _record(self, case: Case, noise: float = 0.0, checkpoint: Path | None = None) -> list[RankRecord]:
        """Run a case, and return the records by rank. Raises _FailedError if it crashes, unless it is one process."""
        target = self.folder / case.name
        shutil.rmtree(target, ignore_errors=True)
        values = {**self.values, **case.values}
        run = RecordedRun(self.source, values, target, STEPS, checkpoint, noise, self.within)
        return self.prover.call(case.ranks, run_and_record, run)


ONE = Case("one process", 1, {})


def _find_last_line(error: RanksFailedError) -> str:
    """Return the last line of the first failure."""
    return next(iter(error.failures.values())).strip().splitlines()[-1]
