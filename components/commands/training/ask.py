"""
ask whether recipes are better than another one: paired runs with the same seeds, until a sequential test decides

The runs are in a folder of the question, together with every result so far, so the same command resumes it.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs

from drawloom import between
from drawloom.components.commands._options import write_file
from drawloom.components.commands.training._race import (
    SIGN_SHARE,
    Arm,
    AskComparison,
    AskCost,
    AskRun,
    Ledger,
    Race,
    Rounds,
)
from drawloom.components.commands.training._sweep_points import MAX_NAME_LENGTH, make_point
from drawloom.components.commands.training.sweep import SweepCommand, open_pool_with_signal_forwarding
from drawloom.components.planning.calibrate import load_local_device_model
from drawloom.components.planning.plan import plan
from drawloom.components.planning.run_length import count_run_length
from drawloom.components.report.page import render_page
from drawloom.components.report.run_record import Drawings, read_run_record
from drawloom.graph.cli.arguments import parse_command
from drawloom.graph.cli.command import (
    OK,
    STOPPED,
    Count,
    OverlayCommand,
    Project,
    Recipe,
    Result,
    UserError,
    argument,
    command,
    format_table,
    option,
    output,
    output_class,
    print_escaped_text,
)
from drawloom.graph.inspect.resolved import make_resolved_recipe
from drawloom.graph.problems import did_you_mean
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.ports import IN_PARAMETERS, STEP_SPECS

MIN_PAIRS = 2
"""The test can't decide after one pair."""
FILE, PAGE = "ask.json", "ask.html"
OWN_KEYS = ("run.name", "run.folder", "run.seed")
UNITS = {"steps": ("steps", 1.0), "m": ("minutes", 1.0), "h": ("minutes", 60.0)}
UNITS |= {"gpu-m": ("GPU minutes", 1.0), "gpu-h": ("GPU minutes", 60.0)}


@attrs.frozen
class AskBudget:
    """Amount that all runs together may cost, in steps, minutes or GPU minutes."""

    amount: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> "AskBudget":
        """Return the budget in a text such as 9600steps, 90m or 3gpu-h. Raises ValueError."""
        if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)(steps|m|h|gpu-m|gpu-h)", text)):
            raise ValueError(f"{text!r} is not a budget; write 9600steps, 90m, 2h or 3gpu-h, for example")
        unit, factor = UNITS[match[2]]
        return cls(float(match[1]) * factor, unit)

    def sum_costs(self, costs: Iterable[AskCost]) -> float:
        """Return the sum of costs in the budget's unit."""
        return sum({"steps": cost.steps, "minutes": cost.minutes}.get(self.unit, cost.gpu_minutes) for cost in costs)

    def __str__(self) -> str:
        return f"{self.amount:,.10g} {self.unit}"


@output_class
class AskResult(Result):
    """An answer with its evidence."""

    folder: Path = output("folder of the runs")
    metric: str = output("compared metric, after the last step")
    best_is: str = output("lowest or highest")
    answer: str | None = output("name of the best recipe; null if undecided")
    remaining: Sequence[str] = output("recipes that are not worse than another one")
    confidence: float = output("probability of the effects' intervals, together and at all times")
    comparisons: Sequence[AskComparison] = output("comparisons between all recipes")
    runs: Sequence[AskRun] = output("runs, by seed")
    cost: AskCost = output("cost of the runs")
    page: Path = output("HTML page with the answer and the curves")
    signal: int = output("signal that stopped the runs, or 0")

    @property
    def exit_code(self) -> int:
        """128 plus the signal that stopped the runs; undecided is an answer."""
        return STOPPED + self.signal if self.signal else OK

    def render(self, format: str) -> str:
        """Return the answer, a table of the comparisons, runs without a value, the cost and the files."""
        return "\n".join(self._format_lines())

    def _format_lines(self) -> Iterator[str]:
        """Yield the text's lines."""
        pairs = max(len(comparison.seeds) for comparison in self.comparisons)
        answer = f"{self.answer} is better" if self.answer else f"undecided between {' and '.join(self.remaining)}"
        yield f"answer  {answer}, by the {self.best_is} {self.metric}, after {pairs} pairs"
        yield f"cost    {self.cost}"
        yield f"locks   {self.folder}/*/seed=*/{LOCK}"
        yield f"page    {self.page}"
        for run in self.runs:
            if run.problem:
                yield f"worse   {run.recipe} with seed {run.seed} has no value: {run.problem}"
        interval = f"{100 * self.confidence:.3g}% interval"
        yield format_table([["recipe", "", "effect", interval, "won", "lost", ""], *self._list_cells()], left=(0, 1, 6))

    def _list_cells(self) -> Iterator[list[str]]:
        """Yield the comparisons' cells."""
        for row in self.comparisons:
            effect = "none" if row.effect is None else f"{row.effect:+.4g}"
            interval = "" if row.low is None else f"{row.low:+.4g} to {row.high:+.4g}"
            counts = f"{row.wins}", f"{row.losses}"
            yield [row.recipe, f"against {row.baseline}", effect, interval, *counts, row.decision]


@command
class AskCommand(OverlayCommand):
    """A race between a recipe and others, until a decision or the budget's end."""

    epilog: ClassVar[str] = "Set single values of all recipes with node.key=value."

    candidates: Sequence[str] = argument("recipes that may be better", metavar="RECIPE", nargs="*", default=())
    than: str = option("recipe to compare with", metavar="RECIPE")
    edit: Sequence[str] = option(
        'a candidate: the recipe of --than with other values, such as --edit="optimizer.lr=1e-3 clip.max_norm=0.5"; '
        "may be repeated",
        default=(),
        metavar="VALUES",
    )
    budget: AskBudget = option(
        "most that all runs may cost together: 9600steps, 90m or 2h of time, or 30gpu-m or 3gpu-h of all processes",
        parse=AskBudget.parse,
        metavar="BUDGET",
    )
    metric: str = option("number that a phase writes, compared after the last step", default="validation_loss")
    best_is: Literal["lowest", "highest"] = option("better values of the metric: low or high", default="lowest")
    error: float = option("probability of a wrong decision", default=0.05, check=between(1e-6, 0.5))
    jobs: Count = option("runs at a time", default=1)
    to: Path | None = option("folder of the runs (default: runs/CANDIDATE-or-RECIPE, by their names)", metavar="FOLDER")

    def run(self, project: Project) -> AskResult:
        arms = {arm.name: arm for arm in self._make_arms()}
        recipes = {name: _load_and_check_recipe(project, arm) for name, arm in arms.items()}
        _check_recipes_differ(recipes)
        for name, recipe in recipes.items():
            _check_metric_is_written(name, recipe, self.metric)
        hashes = {name: make_resolved_recipe(recipe.graph).hash for name, recipe in recipes.items()}
        question = {"recipes": hashes, "metric": self.metric, "best_is": self.best_is, "error": self.error}
        folder = arms[self._baseline_name].folder.parent
        race = Race(list(arms), Ledger.open(folder / FILE, question), self.best_is, self.error)
        planned = {name: self._plan_cost(recipe) for name, recipe in recipes.items()}
        self._check_budget_for_two_pairs(planned.values())
        with open_pool_with_signal_forwarding(self.jobs) as pool:
            rounds = Rounds(project, arms, race.ledger, pool)
            while not pool.received:
                names, seed = race.find_remaining_and_seed()
                missing = [name for name in names if (name, seed) not in race.ledger.runs]
                costs = [race.ledger.average_cost(name, self._parallel_runs) or planned[name] for name in missing]
                if len(names) == 1 or self.budget.sum_costs([race.ledger.cost, *costs]) > self.budget.amount:
                    break
                rounds.run_round(missing, seed)
        if pool.received:
            print_escaped_text("the question is open; the same command resumes it", "stderr")
        return self._make_result(race, folder, pool.received)

    @property
    def _baseline_name(self) -> str:
        return Path(self.than).name.removesuffix(".toml")

    @property
    def _parallel_runs(self) -> int:
        """The runs of a round that are at a time."""
        return min(self.jobs, 1 + len(self.candidates) + len(self.edit))

    def _make_arms(self) -> Iterator[Arm]:
        """Yield the recipes of the question, the baseline first. Raises UserError unless all names differ."""
        named = [(self._baseline_name, self.than, [*self.words])]
        named += [(Path(path).name.removesuffix(".toml"), path, [*self.words]) for path in self.candidates]
        for edit in self.edit:
            words = _split_edit(edit)
            keys, values = zip(*(word.split("=", 1) for word in words), strict=True)
            named.append((make_point(keys, values, []).name, self.than, [*self.words, *words]))
        names = [name for name, _, _ in named]
        if len(names) < 2:
            raise UserError("there is nothing to compare; name a recipe, or write --edit=node.key=value", 2)
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UserError(f"two recipes are named {repeated[0]}; rename one of the files", 2)
        if fixed := [word for _, _, words in named for word in words if word.partition("=")[0] in OWN_KEYS]:
            raise UserError(f"{fixed[0]}: the question names its runs, and chooses their seeds; leave it out", 2)
        title = "-or-".join([*names[1:], names[0]])
        if self.to is None and len(title) > MAX_NAME_LENGTH:
            raise UserError("the names of the recipes are too long for a folder; write one with --to FOLDER", 2)
        folder = self.to or Path("runs") / title
        for name, path, words in named:
            given: dict[str, Any] = {"overlay": self.overlay, "imports": self.imports, "console": self.console}
            sweep = parse_command(SweepCommand, "sweep", [path], **given)
            yield Arm(name, sweep, words, folder / name)

    def _plan_cost(self, recipe: Recipe) -> AskCost:
        """Return the planned cost of a run; of time only for a budget in time."""
        if (length := count_run_length(recipe)) is None:
            raise UserError(f"[{recipe.project.root}] has neither steps nor epochs; write trainer.steps=N", 2)
        if self.budget.unit == "steps":
            return AskCost(length.steps, 0.0, 0.0)
        minutes = plan(recipe, load_local_device_model()).time.seconds * length.steps / 60
        return AskCost(length.steps, minutes / self._parallel_runs, minutes)

    def _check_budget_for_two_pairs(self, planned: Iterable[AskCost]) -> None:
        """Raise UserError if the budget is smaller than the planned cost of two pairs."""
        if (cost := MIN_PAIRS * self.budget.sum_costs(planned)) > self.budget.amount:
            needed = AskBudget(cost, self.budget.unit)
            raise UserError(
                f"--budget: two pairs cost {needed}, and the budget is {self.budget}; write more, or train for fewer "
                "steps",
                2,
            )

    def _make_result(self, race: Race, folder: Path, signal: int) -> AskResult:
        """Return the answer, and write its page."""
        remaining, _ = race.find_remaining_and_seed()
        runs = sorted(race.ledger.runs.values(), key=lambda run: run.seed)
        result = AskResult(
            folder=folder,
            metric=self.metric,
            best_is=self.best_is,
            answer=remaining[0] if len(remaining) == 1 else None,
            remaining=remaining,
            confidence=1 - self.error * (1 - SIGN_SHARE),
            comparisons=race.compare_pairs(),
            runs=runs,
            cost=race.ledger.cost,
            page=folder / PAGE,
            signal=signal,
        )
        folders = {f"{run.recipe}, seed {run.seed}": run.lock.parent for run in runs if run.lock.is_file()}
        if folders:
            records = [read_run_record(path, name, Drawings()) for name, path in folders.items()]
            write_file(result.page, render_page(records, introduction=result.render("text")).encode())
        return result


def _split_edit(edit: str) -> list[str]:
    """Return an edit's words. Raises UserError unless all set a value."""
    try:
        words = shlex.split(edit)
    except ValueError as error:
        raise UserError(f"--edit={edit}: {error}; write --edit='node.key=value node.key=value'", 2) from error
    if not words or not all("=" in word for word in words):
        raise UserError(f"--edit={edit} sets no value; write --edit='node.key=value node.key=value'", 2)
    return words


def _load_and_check_recipe(project: Project, arm: Arm) -> Recipe:
    """Return the checked recipe of an arm's first run."""
    [run] = arm.sweep.load_and_check_runs(project, [arm.make_point(0)], arm.folder)
    return run.recipe


def _check_recipes_differ(recipes: Mapping[str, Recipe]) -> None:
    """Raise UserError if two recipes train alike."""
    resolved = {name: make_resolved_recipe(recipe.graph) for name, recipe in recipes.items()}
    for one, other in combinations(resolved, 2):
        changes = resolved[other].changes(resolved[one].text)
        if all(f"{change.node}.{change.key}" in OWN_KEYS or change.impact == "safe" for change in changes):
            raise UserError(f"{one} and {other} train alike, so neither is better; compare recipes that differ", 2)


def _check_metric_is_written(name: str, recipe: Recipe, metric: str) -> None:
    """Raise UserError if no phase of a recipe writes a number with this name."""
    nodes, root = recipe.graph.nodes, recipe.project.root
    phases = [nodes[phase] for phase in nodes[root].edges["phases"].targets]
    active = [phase for phase in phases if phase.settings.get("every") != "never"]
    known = {value for phase in active for value in phase.spec.traits.flow.writes} - IN_PARAMETERS - STEP_SPECS.keys()
    if metric not in known:
        hint = did_you_mean(metric, known) or f"phases write {', '.join(sorted(known))}"
        raise UserError(f"--metric {metric}: no phase of {name} writes it; {hint}", 2)
