"""Proofs: contracts, and runs on meshes compared with one process."""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import attrs
import torch

from drawloom import RecipeError, UserError
from drawloom.components.checkpoint.manifest import FOLDER as CHECKPOINTS
from drawloom.components.checkpoint.manifest import MANIFEST
from drawloom.components.proving.cases import ONE, Case, list_cases, make_narrow
from drawloom.components.proving.compare import (
    Compared,
    Key,
    find_first_difference,
    measure_errors,
)
from drawloom.components.proving.contracts import check_contracts
from drawloom.components.proving.ranks import DIED, RankPool, RanksFailedError
from drawloom.components.proving.recorder import RankRecord
from drawloom.components.proving.result import ProvedDifference, ProveResult
from drawloom.components.proving.run import ProofRun, ProofSource, RefusedError, run_and_record
from drawloom.components.proving.smallest import STEPS, list_smaller_values, merge_values
from drawloom.components.proving.subject import Subject
from drawloom.graph.project import Recipe

TOLERANCE = 1e-9
"""Relative error, besides the error due to rounding."""
NOISE = 1e-14
"""Relative change of the first weights, to show how much a run amplifies rounding."""
AMPLIFICATION = 100.0
"""Tolerated multiple of the errors due to noise, since every operation rounds."""
NARROW_NOISE = 2.0**-12
"""Relative change of the first weights after which bfloat16 rounds otherwise."""
NARROW_RUNS = 6
TENSOR_FACTOR = 2.0
"""Tolerated multiple of a tensor's largest error in these runs, as `tensor` rounds sums; right meshes have 1.1."""
ROWS_FACTOR = 0.5
"""The same for dimensions that divide only rows and layers; right meshes have 0.3."""
MIN_NARROW_ERROR = 2.0**-7
TIMEOUT = 120.0
SAVED = STEPS // 2
CHECKPOINT = Path(CHECKPOINTS) / f"step-{SAVED}"
REFUSED = f"{RefusedError.__module__}.{RefusedError.__qualname__}: "
NOISY = Case("one process with noise")
AGAIN = Case("one process again")

RESUME_CAUSE = (
    "it is right without the resume: a value is in no node's state, or is saved, sliced or loaded wrongly, as by "
    "`state_dict`, `state_slices` and `load_state_dict`"
)


@attrs.frozen
class _FailedError(Exception):
    """A case with other numbers than one process, or with a crash; and the text for the smallest failing recipe."""

    case: Case
    difference: ProvedDifference | None = None
    crash: str = ""
    recipe: str = ""


@attrs.define(eq=False)
class Prover:
    """
    Runner for proofs; its processes stay alive inside its context.

    `on_progress` is called with two counts, of done cases and all cases, and the next case's name.
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
        only: Sequence[str] = (),
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> ProveResult:
        """
        Check contracts, and compare runs `within` a context.

        No case begins after `budget` seconds. `only` are names of cases to try, by default all.
        """
        with tempfile.TemporaryDirectory(prefix="prove-") as folder:
            source, values, nodes = subject.make_source_values_and_nodes(Path(folder) / "input")
            proof = _Proof(
                prover=self,
                source=source,
                values=values,
                folder=Path(folder),
                within=within,
                budget=budget,
                only=only,
            )
            return proof.run(subject.name, nodes)

    def call(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in `ranks` processes."""
        return self._pools.setdefault(ranks, RankPool(ranks)).call(function, *arguments, timeout=TIMEOUT)


@attrs.define(eq=False, slots=False)
class _Proof:
    """One proof: its recipe, its folder, and its cases so far."""

    prover: Prover
    source: ProofSource
    values: dict[str, Any]
    folder: Path
    within: Callable[[], AbstractContextManager[object]]
    budget: float | None
    only: Sequence[str] = ()
    tolerance: float = TOLERANCE
    start: float = attrs.field(factory=time.monotonic)
    equal: list[str] = attrs.field(factory=list)
    refused: dict[str, str] = attrs.field(factory=dict)
    uncompared: set[str] = attrs.field(factory=set)

    def run(self, subject: str, nodes: Sequence[str]) -> ProveResult:
        """Return the result for a subject, whose `nodes` have contracts to keep."""
        recipe = self.source.load(self.values)
        recipe.check(skip_machine_checks=True)
        cases = list_cases(recipe)
        if unknown := {*self.only} - {case.name for case in cases}:
            known = "; ".join(case.name for case in cases)
            raise UserError(f"there is no case {unknown.pop()!r}; write one of: {known}", 2)
        contracts: list[str] = []
        broken, failure = "", None
        for node in nodes:
            self.prover.on_progress(0, len(cases), f"contracts of [{node}]")
            folder = self.folder / "contracts" / node
            [(checked, broken)] = self.prover.call(1, check_contracts, self.source, self.values, node, folder)
            contracts += checked
            if broken:
                break
        else:
            try:
                self._compare_cases(recipe, cases)
            except _FailedError as error:
                failure = self._find_smallest(error)
        failed = failure.case.name if failure else ""
        return ProveResult(
            subject=subject,
            contracts=contracts,
            broken_contract=broken,
            equal=self.equal,
            failed=failed,
            difference=failure.difference if failure else None,
            crash=failure.crash if failure else "",
            refused=self.refused,
            untried=[case.name for case in cases if case.name not in {*self.equal, *self.refused, failed}],
            uncompared=sorted(self.uncompared),
            recipe=failure.recipe if failure else "",
            path=None,
            seconds=time.monotonic() - self.start,
        )

    def _compare_cases(self, recipe: Recipe, cases: Sequence[Case]) -> None:
        """Compare one process with itself, and then the cases. Raises _FailedError for the first failure."""
        self.prover.on_progress(0, len(cases), ONE.name)
        again = self._record(AGAIN)
        errors = measure_errors(self.one, again)
        self.uncompared |= {key.name for key, error in errors.items() if error and key.kind == "number"}
        self._require_equal(AGAIN, (self.one, again))
        self.equal.append(AGAIN.name)
        names = {case.name: case.resumed for case in cases}
        tried = {name for wanted in self.only or names for name in (wanted, names[wanted])}
        for done, case in enumerate(cases):
            if self.budget is not None and time.monotonic() - self.start > self.budget:
                return
            if case.name not in tried:
                continue
            self.prover.on_progress(done, len(cases), case.name)
            refusal = case.find_refusal(recipe) or self.refused.get(case.resumed, "") or self._compare(case)
            if refusal:
                self.refused[case.name] = refusal
            else:
                self.equal.append(case.name)

    @cached_property
    def one(self) -> RankRecord:
        """One process's record."""
        try:
            return self._record(ONE)[0]
        except RanksFailedError as error:
            if error.last_line.startswith(REFUSED):
                text = error.last_line.removeprefix(REFUSED)
                raise UserError(f"the smallest recipe is refused: {text}", 2) from error
            raise _FailedError(ONE, crash=str(error)) from error

    @cached_property
    def errors_by_noise(self) -> dict[Key, float]:
        """Errors after a change of the first weights in the last bits."""
        return measure_errors(self.one, self._record(NOISY, noise=NOISE))

    @cached_property
    def narrow(self) -> RankRecord:
        """One process's record in bfloat16."""
        return attrs.evolve(self._record(self._narrow_case)[0], exported={})

    @cached_property
    def narrow_errors(self) -> dict[Key, float]:
        """One process's largest errors in bfloat16, in runs that round differently."""
        runs = [self._record(self._narrow_case, NARROW_NOISE, seed) for seed in range(NARROW_RUNS)]
        return measure_errors(self.narrow, *runs)

    @cached_property
    def _narrow_case(self) -> Case:
        return make_narrow(ONE, self.source.load(self.values).graph)

    def _get_tolerance(self, case: Case, value: Compared) -> float:
        if value.key.name in self.uncompared:
            return math.inf
        if case.is_killed or case is AGAIN:
            return 0.0
        if case.is_narrow:
            factor = TENSOR_FACTOR if "tensor" in case.sizes else ROWS_FACTOR
            return max(MIN_NARROW_ERROR, factor * self.narrow_errors.get(value.key, 0.0))
        rounding = torch.finfo(value.expected.dtype).eps if value.expected.dtype.is_floating_point else 0.0
        return self.tolerance + AMPLIFICATION * (rounding + self.errors_by_noise.get(value.key, 0.0))

    def _compare(self, case: Case) -> str:
        """
        Run a case, and compare it with one process, or if it is killed with the same ranks without a kill.

        Return why it was refused at the start, or "". Raises _FailedError for a crash or the first difference.
        """
        try:
            if case.is_killed:
                resumed = [[record] for record in self._kill_and_resume(case)]
                self._require_equal(case, *zip(map(_skip_saved_steps, self._record(case)), resumed, strict=True))
            else:
                one = self.narrow if case.is_narrow else self.one
                self._require_equal(case, (_skip_saved_steps(one) if case.resumed else one, self._record(case)))
        except RanksFailedError as error:
            refusal = error.last_line.removeprefix(REFUSED)
            if case.resumed or refusal == error.last_line:
                raise _FailedError(case, crash=refusal if case.resumed else str(error)) from error
            return f"at the start: {refusal}"
        return ""

    def _require_equal(self, case: Case, *pairs: tuple[RankRecord, Sequence[RankRecord]]) -> None:
        """Raise _FailedError with the first difference of the earliest step, between a record and ranks."""
        tolerance = partial(self._get_tolerance, case)
        differences = (find_first_difference(one, ranks, case.sizes, tolerance) for one, ranks in pairs)
        difference: Any = min(filter(None, differences), key=lambda difference: difference.step, default=None)
        if difference is not None:
            is_resumed = case.resumed or case.is_killed
            raise _FailedError(case, attrs.evolve(difference, cause=RESUME_CAUSE) if is_resumed else difference)

    def _kill_and_resume(self, case: Case) -> list[RankRecord]:
        """Kill all ranks after a checkpoint, and return their records of a resume. Raises _FailedError without one."""
        run = self._make_run(case)
        killed = attrs.evolve(run, last_step=SAVED + 1, killed_after=run.folder / CHECKPOINT / MANIFEST)
        try:
            self.prover.call(case.ranks, run_and_record, killed)
        except RanksFailedError as error:
            if {*error.failures.values()} != {DIED}:
                raise
        try:
            return self.prover.call(case.ranks, run_and_record, run)
        except RanksFailedError as error:
            raise _FailedError(case, crash=error.last_line.removeprefix(REFUSED)) from error

    def _record(self, case: Case, noise: float = 0.0, seed: int = 0) -> list[RankRecord]:
        """Run a case, and return the records by rank."""
        run = attrs.evolve(self._make_run(case), noise=noise, seed=seed)
        return self.prover.call(case.ranks, run_and_record, run)

    def _make_run(self, case: Case) -> ProofRun:
        """Return a case's run, in a new folder."""
        folder = self.folder / case.name
        shutil.rmtree(folder, ignore_errors=True)  # of the same case with a larger recipe
        return ProofRun(
            source=self.source,
            values=merge_values(self.values, case.values),
            folder=folder,
            last_step=case.last_step,
            copied=self.folder / case.resumed / CHECKPOINT if case.resumed else None,
            within=self.within,
        )

    def _find_smallest(self, failure: _FailedError) -> _FailedError:
        """Return the failure with the smallest recipe that still fails, and with its text."""
        values, case, difference = self.values, failure.case, failure.difference
        if difference is not None and not (case.resumed or case.is_killed or case.is_narrow):
            for smaller in list_smaller_values(self.source.load(values), difference.step):
                self.prover.on_progress(0, 1, "the smallest failing recipe")
                tried = attrs.evolve(self, values=merge_values(values, smaller), equal=[], refused={})
                tried.tolerance, tried.errors_by_noise = max(TOLERANCE, difference.error / 10), {}
                with suppress(RecipeError, UserError):
                    if case.find_refusal(self.source.load(tried.values)):
                        continue
                    try:
                        tried._compare(case)
                    except _FailedError as error:
                        if error.difference is not None:
                            values, failure = tried.values, error
        comment = f"{case.name}: {failure.difference or 'it crashes'}"
        return attrs.evolve(failure, recipe=self.source.format_with(merge_values(values, case.values), comment))


def _skip_saved_steps(record: RankRecord) -> RankRecord:
    """Return a record without the steps before the checkpoint."""
    return attrs.evolve(record, snapshots=[part for part in record.snapshots if part.step > SAVED])
