"""
Proofs: contracts on a recipe's nodes, and runs with other meshes, schedules and precisions beside one process.
"""

import importlib
import math
import pkgutil
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from itertools import combinations, count
from math import prod
from pathlib import Path
from typing import Any

import attrs
import torch

from drawloom import Recipe, RecipeError, UserError, internal
from drawloom.components import ports
from drawloom.components.checkpoint.commit import FOLDER as CHECKPOINTS
from drawloom.components.checkpoint.commit import MANIFEST
from drawloom.components.proving.compare import (
    Compared,
    Key,
    find_first_difference,
    measure_errors,
)
from drawloom.components.proving.ranks import DIED, RankPool, RanksFailedError
from drawloom.components.proving.recorder import GRADIENT, RankRecord
from drawloom.components.proving.result import ProvedDifference, ProveResult
from drawloom.components.proving.run import ProofRun, ProofSource, RefusedError, Subject, Values, run_and_record
from drawloom.components.proving.smallest import (
    DENSE,
    EXPERTS,
    FLOAT64,
    NARROW,
    STEPS,
    VALUES,
    list_smaller_values,
    merge_values,
)
from drawloom.graph.component import is_port_or_component
from drawloom.graph.testing.ports import BrokenContractError, check_port, load_contract
from drawloom.graph.types.port_match import implements
from drawloom.graph.wiring.graph import Graph
from drawloom.ports import DIMENSIONS, Batching, Executor, Mesh, Model, Precision, RunInfo, Schedule


def iterate_ports() -> Iterator[type]:
    """Yield every port."""
    for module in pkgutil.iter_modules(ports.__path__):
        for item in vars(importlib.import_module(f"{ports.__name__}.{module.name}")).values():
            if is_port_or_component(item) and item.__module__.endswith(f".{module.name}"):
                yield item


def has_contract(port: type) -> bool:
    """Return whether a port has a contract."""
    try:
        return bool(load_contract(port))
    except LookupError:
        return False


def check_contracts(source: ProofSource, values: Values, node: str, folder: Path) -> tuple[list[str], str]:
    """
    Check a recipe's node against its ports' contracts.

    Return the ports' names, and the first broken property with its reason, or "".
    """
    recipe, numbers = source.load(values), count()
    checked: list[str] = []

    @contextmanager
    def open_node() -> Iterator[Any]:
        """Open the node, in another run folder every time."""
        home = {name: {"folder": str(folder / str(next(numbers)))} for name in recipe.graph.implementers(RunInfo)}
        with recipe.with_values(home, "prove").open(only=node) as nodes:
            yield nodes[node]

    cls = recipe.graph.nodes[node].spec.cls
    for port in (port for port in iterate_ports() if implements(cls, port) and has_contract(port)):
        try:
            check_port(open_node, port)
            checked.append(port.__name__)
        except Exception as error:
            kind = "" if isinstance(error, BrokenContractError | UserError) else f"{type(error).__name__}: "
            note = "".join(getattr(error, "__notes__", [])[:1]).partition("\n")[0]
            return checked, f"{note} {kind}{error}"
    return checked, ""


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@attrs.frozen
class Case:
    """
    Change to a recipe with the same numbers as before.

    `sizes` are the mesh dimensions above 1. A case resumes from the checkpoint of the case `resumed`, if it has a name.
    A narrow case computes in bfloat16. In a killed case, all ranks are killed after a checkpoint, and resume.
    """

    name: str
    values: Mapping[str, Any] = attrs.field(factory=dict)
    sizes: Mapping[str, int] = attrs.field(factory=dict)
    resumed: str = ""
    is_narrow: bool = False
    is_killed: bool = False

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return prod(self.sizes[name] for name in self.sizes.keys() & {*DIMENSIONS})

    @property
    def last_step(self) -> int:
        """The last step: in bfloat16 the first, since rounding errors grow."""
        return 1 if self.is_narrow else STEPS

    def find_refusal(self, recipe: Recipe) -> str:
        """Return why `check` refuses the case, or why it can't be compared, or ""."""
        models = [recipe.graph.nodes[name] for name in recipe.graph.implementers(Model)]
        others = [node.settings for node in models if node.spec.use != EXPERTS["use"]]
        if self.is_narrow and any(settings.get(key) for settings in others for key in EXPERT_COUNTS):
            return "a router may choose other experts after rounding"
        try:
            recipe.with_values(self.values, "prove").check(skip_machine_checks=True)
        except RecipeError as error:
            return "; ".join(problem.text for problem in error.problems)
        return ""


ONE = Case("one process")
KILLED = {"data_shard": 2}
REPLICATED_PIPELINE = {"pipeline": 2, "data_replicate": 2}
BOTH_ENDS = "zero_bubble_v"
"""A schedule whose first rank has the first and the last stage."""
SINGLE: tuple[dict[str, int], ...] = (
    *({name: 2} for name in ("tensor", "context", "pipeline", "data_shard", "data_replicate")),
    {"data_shard": 2, "expert": 2},
)


def list_cases(recipe: Recipe) -> list[Case]:
    """
    Return the cases, most likely faults first.

    Single dimensions and their checkpoints come before several dimensions, schedules and narrow dtypes.
    """
    graph = recipe.graph
    singles = [_make_mesh_case(graph, sizes) for sizes in SINGLE]
    pairs = [dict.fromkeys(pair, 2) for pair in combinations(DIMENSIONS, 2)]
    return [
        make_killed(ONE),
        *(Case("microbatches of another size", {name: {"micro_size": 8}}) for name in graph.implementers(Batching)),
        *singles,
        make_killed(_make_mesh_case(graph, KILLED)),
        *(
            Case(f"one process, resumed from {case.name}", sizes={"checkpoint": 1}, resumed=case.name)
            for case in singles
        ),
        *(attrs.evolve(case, name=f"{case.name}, resumed from one process", resumed=ONE.name) for case in singles),
        *(_make_mesh_case(graph, sizes) for sizes in (*pairs, *VALUES["expert_meshes"])),
        *_list_pipeline_cases(graph, recipe),
        *(make_narrow(case, graph) for case in singles if "expert" not in case.sizes),
    ]


def make_killed(case: Case) -> Case:
    """Return a case whose ranks are killed, and resume."""
    return attrs.evolve(case, name=f"{case.name}, killed and resumed", is_killed=True)


def _make_mesh_case(graph: Graph, sizes: Mapping[str, int]) -> Case:
    values: dict[str, Any] = {name: {"data_replicate": 1, **sizes} for name in graph.implementers(Mesh)}
    return Case(", ".join(f"{name} = {size}" for name, size in sizes.items()), values, sizes)


def _list_pipeline_cases(graph: Graph, recipe: Recipe) -> Iterator[Case]:
    """
    Yield a case on two pipeline ranks for every other schedule, and one with replicas for a rank with both ends.
    """
    mesh, replicated = (_make_mesh_case(graph, sizes) for sizes in ({"pipeline": 2}, REPLICATED_PIPELINE))
    for schedule in graph.implementers(Schedule):
        for use in recipe.project.registry.names():
            if use.startswith("pipeline.schedules.") and use != graph.nodes[schedule].spec.use:
                name, values = use.rpartition(".")[2], {schedule: {"use": use}}
                if name == "circular":
                    values |= {node: {"use": "pipeline.circular.executor"} for node in graph.implementers(Executor)}
                for case in (mesh, replicated) if name == BOTH_ENDS else (mesh,):
                    yield attrs.evolve(case, name=f"{case.name}, {name}", values={**case.values, **values})


def make_narrow(case: Case, graph: Graph, precision: Values = NARROW) -> Case:
    """Return a case in bfloat16 without experts, since a router may choose other experts after rounding."""
    models = {name: DENSE for name in graph.implementers(Model) if graph.nodes[name].spec.use == EXPERTS["use"]}
    values = {**case.values, **models, **dict.fromkeys(graph.implementers(Precision), precision)}
    return attrs.evolve(case, name=f"{case.name}, bfloat16", values=values, is_narrow=True)


TOLERANCE = 1e-9
"""Relative error, besides the error due to rounding."""
NOISE = 1e-14
"""Relative change of the first weights, to show how much a run amplifies rounding."""
AMPLIFICATION = 100.0
"""Tolerated multiple of the errors due to noise, since every operation rounds."""
NARROW_NOISE = 2.0**-12
"""Relative change of the first weights after which bfloat16 rounds otherwise."""
NARROW_RUNS = 6
TENSOR_FACTOR = 3.0
"""Tolerated multiple of a value's largest error in these runs, as `tensor` rounds sums; right meshes have 1.8."""
ROWS_FACTOR = 2.0
"""The same for dimensions that divide only rows and layers; right meshes have 1.2."""
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
    _pools: dict[int, RankPool] = internal(factory=dict)

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
    def wide(self) -> RankRecord:
        """One process's record in float64, to which narrow cases are compared."""
        return attrs.evolve(self._record(self._make_narrow(FLOAT64))[0], exported={})

    @cached_property
    def narrow_errors(self) -> dict[Key, float]:
        """One process's largest errors in bfloat16, in runs that round differently."""
        case = self._make_narrow(NARROW)
        runs = [self._record(case, NARROW_NOISE * bool(seed), seed) for seed in range(NARROW_RUNS)]
        return measure_errors(self.wide, *runs)

    def _make_narrow(self, precision: Values) -> Case:
        return make_narrow(ONE, self.source.load(self.values).graph, precision)

    def _get_tolerance(self, case: Case, value: Compared) -> float:
        if value.key.name in self.uncompared:
            return math.inf
        if case.is_killed or case is AGAIN:
            return 0.0
        if case.is_narrow:
            if value.key.kind == "piece" and not value.key.name.startswith(GRADIENT):
                return math.inf  # rounding may turn an update's sign where a gradient is near 0
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
                # Every rank is compared with itself, from the checkpoint on.
                resumed = [[record] for record in self._kill_and_resume(case)]
                self._require_equal(case, *zip(map(_skip_saved_steps, self._record(case)), resumed, strict=True))
            else:
                one = self.wide if case.is_narrow else self.one
                self._require_equal(case, (_skip_saved_steps(one) if case.resumed else one, self._record(case)))
        except RanksFailedError as error:
            # A refusal has the prefix REFUSED. After a resume it is a failure, too: the same recipe has started before.
            refusal = error.last_line.removeprefix(REFUSED)
            if case.resumed or refusal == error.last_line:
                raise _FailedError(case, crash=refusal if case.resumed else str(error)) from error
            return f"at the start: {refusal}"
        return ""

    def _require_equal(self, case: Case, *pairs: tuple[RankRecord, Sequence[RankRecord]]) -> None:
        """
        Raise _FailedError with the earliest step's first difference in pairs of an expected record, and records by
        rank, whose pieces make up its values.
        """
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
