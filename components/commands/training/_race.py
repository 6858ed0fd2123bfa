"""
Races between recipes: paired runs in rounds, a file with all results, and the comparisons that they decide.

The test of paired differences stays valid when it is looked at after every pair. Differences of two runs with one seed
are taken as independent and normal, with unknown mean and variance. Their mean has a confidence sequence: with the
given probability, all of its intervals contain the mean. It inverts Lai's mixture of t likelihood ratios over effect
sizes with a normal distribution (Lai 1976, "On confidence sequences"; Wang and Ramdas 2025, "Anytime-valid t-tests and
confidence sequences for Gaussian means with unknown variance", theorem 4.9).

A run without a result is worse than any run with one, so its difference is infinite, and there is no mean. From then on
the signs of all pairs decide, by the mixture of binomial likelihood ratios over a beta distribution (Robbins 1970,
"Statistical methods related to the law of the iterated logarithm"). The two parts divide the error between them.
"""

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, count
from pathlib import Path
from typing import Any, Literal

import attrs

from drawloom import UserError
from drawloom.components.commands.training._sweep_points import Point, make_point
from drawloom.components.commands.training.sweep import ProcessPool, SweepCommand
from drawloom.components.report.metrics import METRICS, read_lines
from drawloom.components.report.run_record import is_run_in_use
from drawloom.components.storage.durable_files import replace_file
from drawloom.components.storage.step_log import parse_step_lines
from drawloom.graph.cli.command import OK, STOPPED, Project, output, output_class, print_escaped_text
from drawloom.graph.cli.json_text import dump_json
from drawloom.graph.recipe.lockfile import LOCK

Decision = Literal["better", "worse", "undecided"]

SIGN_SHARE = 0.2
"""The signs' share in the error."""
PRECISION = 0.3
"""1 / variance of the effect sizes in the mixture. With it 8 to 12 pairs decide on 1 to 1.5 standard deviations."""
SIGN_PRIOR = 0.1
"""Parameter of the beta distribution: small, because nearly all pairs with a failed run have the same sign."""


@attrs.frozen
class Judgement:
    """A decision about differences, and their mean with an interval; without a mean if one is infinite."""

    decision: Decision
    mean: float | None
    interval: tuple[float, float] | None
    wins: int
    losses: int


def judge_differences(differences: Sequence[float], error: float) -> Judgement:
    """
    Judge differences: positive ones are better; NaN is a pair without any result, and counts for neither side.

    A wrong decision after any number of pairs has at most the probability `error`.
    """
    wins, losses = sum(number > 0 for number in differences), sum(number < 0 for number in differences)
    if all(map(math.isfinite, differences)):
        interval = compute_mean_interval(differences, error * (1 - SIGN_SHARE))
        mean = statistics.fmean(differences) if differences else None
        decision: Decision = "undecided"
        if interval is not None and not interval[0] <= 0 <= interval[1]:
            decision = "better" if interval[0] > 0 else "worse"
        return Judgement(decision, mean, interval, wins, losses)
    is_decided = compute_sign_evidence(wins, losses) >= 1 / (error * SIGN_SHARE)
    decision = ("better" if wins > losses else "worse") if is_decided else "undecided"
    return Judgement(decision, None, None, wins, losses)


def compute_mean_interval(values: Sequence[float], error: float) -> tuple[float, float] | None:
    """Return the confidence sequence's interval after these values; None while it is unbounded."""
    count = len(values)
    if count < 2:
        return None
    mean = statistics.fmean(values)
    squares = sum((value - mean) ** 2 for value in values)
    # (squares + count d^2) / (squares + count d^2 shrunk) is at most `ratio` for all d = mean - mu in the interval
    shrunk = PRECISION / (count + PRECISION)
    ratio = math.pow(error * math.sqrt(shrunk), -2 / count)
    if ratio * shrunk >= 1:
        return None
    half = math.sqrt((ratio - 1) * squares / (count * (1 - ratio * shrunk)))
    return mean - half, mean + half


def compute_sign_evidence(wins: int, losses: int) -> float:
    """Return the likelihood ratio of these signs: of unknown chances, mixed, against equal chances."""
    logarithm = (wins + losses) * math.log(2) + _log_beta(SIGN_PRIOR + wins, SIGN_PRIOR + losses)
    return math.exp(logarithm - _log_beta(SIGN_PRIOR, SIGN_PRIOR))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


WAIT_SECONDS = 0.5


@output_class
class AskCost:
    """Cost of runs."""

    steps: int = output("steps of all runs")
    minutes: float = output("minutes of wall-clock time, with runs at a time")
    gpu_minutes: float = output("minutes of all runs' processes, which have one device each")

    def __str__(self) -> str:
        return f"{self.steps:,} steps, {self.minutes:.1f} minutes, {self.gpu_minutes:.1f} GPU minutes"


@output_class
class AskRun:
    """A finished run."""

    recipe: str = output("name of the recipe")
    seed: int = output("run.seed")
    value: float | None = output("last value of the metric; null for a failed or diverged run")
    problem: str = output("reason why the run has no value, or an empty string")
    steps: int = output("steps of the run")
    seconds: float = output("seconds of the run's process")
    lock: Path = output("lock file of the run")


@output_class
class AskComparison:
    """A recipe against another one, over the seeds that both have."""

    recipe: str = output("name of the recipe")
    baseline: str = output("name of the other recipe")
    decision: Decision = output("whether the recipe is better or worse, or undecided")
    effect: float | None = output("mean difference of the metric, recipe - baseline; null with a run without a value")
    low: float | None = output("lower end of the effect's interval; null while it is unbounded")
    high: float | None = output("upper end of the effect's interval; null while it is unbounded")
    seeds: Sequence[int] = output("seeds of the pairs")
    wins: int = output("pairs in which the recipe is better; a run without a value is worse than any other")
    losses: int = output("pairs in which the recipe is worse")


@attrs.frozen(eq=False)
class Arm:
    """A recipe in the question: a sweep over seeds, in its own folder."""

    name: str
    sweep: SweepCommand
    words: Sequence[str]
    folder: Path

    def make_point(self, seed: int) -> Point:
        """Return the sweep's point with a seed."""
        return make_point(["run.seed"], [str(seed)], self.words)

    def make_run_folder(self, seed: int) -> Path:
        """Return the run's folder for a seed."""
        return self.folder / self.make_point(seed).name

    def make_command(self, project: Project, seed: int) -> list[str]:
        """Return the command to start or resume the run with a seed."""
        return self.sweep.make_train_command(project, self.make_point(seed).make_run_words(self.folder))


@attrs.define(eq=False)
class Ledger:
    """All results of a question, in a file that is replaced with every result."""

    path: Path
    question: dict[str, Any]
    wall_seconds: float = 0.0
    runs: dict[tuple[str, int], AskRun] = attrs.field(factory=dict)

    @classmethod
    def open(cls, path: Path, question: dict[str, Any]) -> "Ledger":
        """Read the results of a question, or begin. Raises UserError if the file has another question."""
        try:
            content = json.loads(path.read_text("utf-8"))
            runs = [AskRun(**{**run, "lock": Path(run["lock"])}) for run in content["runs"]]
            wall, asked = float(content["wall_seconds"]), dict(content["question"])
        except FileNotFoundError:
            return cls(path, question)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} can't be read: {error}; write another folder with --to", 2) from error
        if changed := [key for key in question if asked.get(key) != question[key]]:
            raise UserError(f"{path} has another question ({', '.join(changed)}); write another folder with --to", 2)
        return cls(path, question, wall, {(run.recipe, run.seed): run for run in runs})

    def record(self, run: AskRun) -> None:
        """Add a result, and write the file."""
        self.runs[run.recipe, run.seed] = run
        content = {"question": self.question, "wall_seconds": self.wall_seconds, "runs": [*self.runs.values()]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, dump_json(content).encode())

    @property
    def cost(self) -> AskCost:
        """All results' cost."""
        runs = self.runs.values()
        return AskCost(sum(run.steps for run in runs), self.wall_seconds / 60, sum(run.seconds for run in runs) / 60)

    def average_cost(self, name: str, parallel_runs: int) -> AskCost | None:
        """Return a recipe's mean cost; None without runs."""
        if not (runs := [run for run in self.runs.values() if run.recipe == name]):
            return None
        minutes = sum(run.seconds for run in runs) / len(runs) / 60
        return AskCost(max(run.steps for run in runs), minutes / parallel_runs, minutes)


@attrs.frozen(eq=False)
class Race:
    """
    A race between recipes: after every seed, a recipe leaves that is worse than another one.

    The comparisons between all pairs of recipes divide the error, so that all decisions together keep it.
    """

    names: Sequence[str]
    ledger: Ledger
    best_is: str
    error: float

    def find_remaining_and_seed(self) -> tuple[list[str], int]:
        """Return the recipes still in the race, and the next seed for them."""
        remaining = list(self.names)
        for seed in count():
            if len(remaining) == 1 or any((name, seed) not in self.ledger.runs for name in remaining):
                break
            decided = [pair for pair in self.compare_pairs(seed + 1) if pair.decision != "undecided"]
            worse = {pair.recipe if pair.decision == "worse" else pair.baseline for pair in decided}
            remaining = [name for name in remaining if name not in worse] or remaining
        return remaining, seed

    def compare_pairs(self, seeds: int | None = None) -> list[AskComparison]:
        """Return the comparisons between all recipes, over the first `seeds` seeds or all."""
        pairs = list(combinations(self.names, 2))
        return [self._compare(recipe, other, self.error / len(pairs), seeds) for other, recipe in pairs]

    def _compare(self, recipe: str, baseline: str, error: float, seeds: int | None) -> AskComparison:
        runs, sign = self.ledger.runs, 1.0 if self.best_is == "highest" else -1.0
        paired = sorted(seed for name, seed in runs if name == recipe and (baseline, seed) in runs)[:seeds]
        values = [(runs[recipe, seed].value, runs[baseline, seed].value) for seed in paired]
        judged = judge_differences([_compute_advantage(mine, other, sign) for mine, other in values], error)
        ends = sorted(sign * end for end in judged.interval) if judged.interval else [None, None]
        return AskComparison(
            recipe=recipe,
            baseline=baseline,
            decision=judged.decision,
            effect=None if judged.mean is None else sign * judged.mean,
            low=ends[0],
            high=ends[1],
            seeds=paired,
            wins=judged.wins,
            losses=judged.losses,
        )


def _compute_advantage(value: float | None, other: float | None, sign: float) -> float:
    """Return by how much a value is better; a missing one is infinitely worse, and NaN stands for two missing ones."""
    if value is None or other is None:
        return math.nan if value is other else -math.inf if value is None else math.inf
    return sign * (value - other)


@attrs.frozen(eq=False)
class Rounds:
    """Runner of a race's runs: all runs with a seed in one round, several at a time."""

    project: Project
    arms: Mapping[str, Arm]
    ledger: Ledger
    pool: ProcessPool

    def run_round(self, names: Sequence[str], seed: int) -> None:
        """
        Run recipes with a seed, and record every result as soon as its run ends; failed runs at the end.

        A signal to this process or to a run ends the round. Raises UserError if all runs fail: the recipes' difference
        isn't the reason.
        """
        failed, waiting = list[AskRun](), list(names)
        while waiting and not self.pool.received:
            started, waiting = waiting, []
            for name, code, seconds in self._run_and_yield_seconds(started, seed):
                folder = self.arms[name].make_run_folder(seed)
                if code == OK:
                    self.ledger.record(self.read_result(name, seed, seconds))
                elif self.pool.received or code > STOPPED:
                    self.pool.received = self.pool.received or code - STOPPED
                elif is_run_in_use(folder):  # it had just been started by a command that was killed
                    waiting.append(name)
                else:
                    failed.append(self.read_result(name, seed, seconds, f"its process ended with exit code {code}"))
        if self.pool.received:
            return
        if failed and not any(run.seed == seed for run in self.ledger.runs.values()):
            raise UserError(
                f"all runs with seed {seed} failed, so nothing is compared; try: drawloom run {failed[0].lock.parent}"
            )
        for run in failed:
            self.ledger.record(run)

    def _run_and_yield_seconds(self, names: Sequence[str], seed: int) -> Iterator[tuple[str, int, float]]:
        """Run recipes, and yield name, exit code and seconds when one ends; count the time since the last one."""
        starts = dict[int, float]()

        def note_start(index: int) -> None:
            starts[index] = time.monotonic()
            print_escaped_text(f"seed {seed}: {names[index]}")

        for name in names:
            # Wait for a run that a killed command has left, or until a signal
            folder = self.arms[name].make_run_folder(seed)
            if is_run_in_use(folder):
                print_escaped_text(f"waiting for the process that runs {folder}")
            while is_run_in_use(folder) and not self.pool.received:
                time.sleep(WAIT_SECONDS)
        commands = [self.arms[name].make_command(self.project, seed) for name in names]
        last = time.monotonic()
        for index, code in self.pool.run_and_yield_exit_codes(commands, note_start):
            now = time.monotonic()
            self.ledger.wall_seconds += now - last
            last = now
            yield names[index], code, now - starts[index]

    def read_result(self, name: str, seed: int, seconds: float, problem: str = "") -> AskRun:
        """Return a run's result. Raises UserError if it has finished and never had the metric."""
        folder, metric = self.arms[name].make_run_folder(seed), self.ledger.question["metric"]
        lines, _ = parse_step_lines(b"".join(read_lines(folder / METRICS)))
        rows = [line.row for line in lines]
        values = [row[metric] for row in rows if metric in row]
        if not (values or problem):
            names = ", ".join(sorted({key for row in rows for key in row}))
            raise UserError(f"--metric {metric}: {folder} does not have it; write one of {names}", 2)
        unknown = [key for key in ("loss", metric) if [row[key] for row in rows if key in row][-1:] == [None]]
        if unknown and not problem:  # JSON has no infinity and no NaN; a skipped step has no loss
            problem = f"its last {unknown[0]} is not finite"
        return AskRun(
            recipe=name,
            seed=seed,
            value=None if problem else values[-1],
            problem=problem,
            steps=lines[-1].step if lines else 0,
            seconds=seconds,
            lock=folder / LOCK,
        )
