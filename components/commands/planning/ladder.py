"""
scale a recipe's width or depth by muP or CompleteP, check that activations keep their size, and fit loss to compute

The coordinate check trains every size for some steps. In muP, the root mean square of each layer's outputs does not
grow with the width; in CompleteP, not with the depth either; in the standard parametrization it does.
"""

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from drawloom import above
from drawloom.components.commands._options import write_file
from drawloom.components.commands._plots import Panel, draw_svg_panels
from drawloom.components.report.metrics import Column, read_metrics
from drawloom.graph.cli.command import (
    FAILED,
    JSON,
    OK,
    Count,
    Project,
    Recipe,
    RecipeCommand,
    Result,
    UserError,
    argument,
    command,
    format_table,
    option,
    output,
    output_class,
)
from drawloom.graph.toml.emit import dump_toml
from drawloom.graph.wiring.graph import Graph
from drawloom.ports import CountsFlops, Parametrization

Overlay = dict[str, dict[str, Any]]
Dimension = Literal["width", "depth"]

WIDTHS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
DEPTH = "num_hidden_layers"
SCALED = {"width": WIDTHS, "depth": (DEPTH,)}
PARAMETRIZATION_EDGE = "parametrization"


def make_scaled_model_overlay(graph: Graph, multiple: int, dimension: Dimension, parametrization: str) -> Overlay:
    """
    Return overlay values for a model `multiple` times as wide or deep, with the recipe's model as the base.

    Width adds heads; head_dim is constant. `parametrization` is "mup", "completep" or "standard". Raises UserError if
    the recipe leaves out a size, has no single model that accepts a parametrization, or already has a parametrization.
    """
    model = _find_model_node_accepting_parametrization(graph)
    settings = graph.nodes[model].settings
    if missing := [name for name in (*WIDTHS, "head_dim", DEPTH) if not settings[name]]:
        raise UserError(f"[{model}] has no {missing[0]}; write all sizes of the smallest model in the recipe", 2)
    if existing := graph.implementers(Parametrization):
        raise UserError(f"the recipe has [{existing[0]}], which ladder adds itself; remove it", 2)
    sizes = {name: settings[name] * multiple for name in SCALED[dimension]}
    if parametrization == "standard":
        return {model: sizes}
    base = {"use": f"model.parametrization.{parametrization}", "base_hidden_size": settings["hidden_size"]}
    if parametrization == "completep":
        base["base_num_hidden_layers"] = settings[DEPTH]
    return {model: {**sizes, PARAMETRIZATION_EDGE: base}}


def format_overlay(values: Mapping[str, Mapping[str, Any]], comment: str) -> str:
    """Return values as a TOML overlay, below a comment with the text `comment`."""
    lines = [f"# {comment}"]
    for node, settings in values.items():
        lines += ["", f"[{node}]", *(f"{key} = {dump_toml(value)}" for key, value in settings.items())]
    return "\n".join(lines) + "\n"


def _find_model_node_accepting_parametrization(graph: Graph) -> str:
    """Return the name of the only model node that accepts a parametrization. Raises UserError."""
    names = [
        name
        for name, node in graph.nodes.items()
        if any(field.name == PARAMETRIZATION_EDGE for field in node.spec.edges)
        and {*WIDTHS, DEPTH} <= node.settings.keys()
    ]
    if len(names) != 1:
        remedy = "write use = model.granite, model.llama or model.qwen3.dense"
        raise UserError(f"the recipe has {len(names)} models that accept a parametrization; {remedy}", 2)
    return names[0]


CONFIDENCE = 0.95
MIN_POINTS = 3
"""Two points leave no degree of freedom for an interval."""


@output_class
class PowerLaw:
    """Fit y = coefficient * x ** exponent."""

    coefficient: float = output("value at x = 1")
    exponent: float = output("slope of log y over log x")
    exponent_low: float = output("lower end of the exponent's 95% confidence interval")
    exponent_high: float = output("upper end of the exponent's 95% confidence interval")

    def value_at(self, x: float) -> float:
        """Return the fitted value at x."""
        return self.coefficient * math.pow(x, self.exponent)


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw | None:
    """
    Fit a power law to positive (x, y); None for fewer than three different x: they have no interval.

    The interval is Student's for a slope of ordinary least squares: errors of log y are independent and normal, with
    equal variances (Draper and Smith, "Applied Regression Analysis", section 1.4).
    """
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    if len(set(xs)) < MIN_POINTS:
        return None
    line = statistics.linear_regression(xs, ys)
    degrees_of_freedom = len(points) - 2
    residuals = [y - line.intercept - line.slope * x for x, y in zip(xs, ys, strict=True)]
    spread = math.sqrt(sum(r * r for r in residuals) / degrees_of_freedom / (statistics.pvariance(xs) * len(xs)))
    half = compute_central_t_quantile(CONFIDENCE, degrees_of_freedom) * spread
    return PowerLaw(math.exp(line.intercept), line.slope, line.slope - half, line.slope + half)


def compute_central_t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Return t such that a variable of Student's distribution is in [-t, t] with `probability`."""
    low, high = 0.0, 1.0
    while compute_central_t_probability(high, degrees_of_freedom) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if compute_central_t_probability(middle, degrees_of_freedom) < probability else (low, middle)
        )
    return high


def compute_central_t_probability(t: float, degrees_of_freedom: int) -> float:
    """
    Return the probability of [-t, t] for a Student variable.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees_of_freedom))
    is_odd = degrees_of_freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = term if degrees_of_freedom > 1 else 0.0
    for number in range(3 if is_odd else 2, degrees_of_freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (number - 1) / number
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total


MEASURE = "coordinates_of_ladder"
OPTIMIZER_SETTINGS = {"lr", "groups", "betas"}
RMS = "activation_rms/"
LAST_LAYER = "last layer"
FLAT = 0.15
"""Largest slope of a flat coordinate check: growth by 11% when the width doubles."""


@output_class
class LadderRung:
    """Overlay for a multiple of the recipe's size, and measurements of its training."""

    multiple: int = output("size as a multiple of the recipe's")
    rms: Mapping[str, float] = output("root mean square of a layer's outputs in the last step, by layer")
    loss: float = output("mean loss in the last quarter, at the best learning rate")
    flops: float = output("floating-point operations in products with parameters, for all steps")
    losses: Mapping[str, float] = output("mean loss in the last quarter, by learning rate; with --lr only")
    best_lr: float | None = output("learning rate with the smallest loss; null without --lr")
    overlay: str = output("settings for the size in TOML")


@output_class
class LadderResult(Result):
    """A coordinate check over sizes, a fit of loss against compute, and learning rates with --lr."""

    formats: ClassVar[tuple[str, ...]] = ("text", "svg", JSON)

    parametrization: str = output("mup, completep or standard")
    dimension: str = output("width or depth")
    steps: int = output("steps for every size")
    rungs: Sequence[LadderRung] = output("sizes, the smallest first")
    slopes: Mapping[str, float] = output("slope of log rms over log size, by layer; 0 is flat")
    flat: bool = output("whether no slope is larger than 0.15 either way")
    fit: PowerLaw | None = output("power law of the loss over flops; null for fewer than three sizes")

    @property
    def exit_code(self) -> int:
        """1 if the coordinate check of muP or CompleteP is not flat."""
        return OK if self.flat or self.parametrization == "standard" else FAILED

    def render(self, format: str) -> str:
        """Return tables of outputs, losses and learning rates by size, or a picture."""
        return self._draw_svg() if format == "svg" else "\n".join(self._format_tables())

    def _format_tables(self) -> Iterator[str]:
        """Yield the tables with their titles."""
        sizes = [f"x{rung.multiple}" for rung in self.rungs]
        rows = [["layer", *sizes, "slope"]]
        rows += [
            [layer, *(f"{rung.rms[layer]:.4g}" for rung in self.rungs), f"{slope:+.3f}"]
            for layer, slope in self.slopes.items()
        ]
        yield f"{self._title}: {'flat' if self.flat else 'not flat'}"
        yield format_table(rows, left=())
        if self.rungs[0].losses:
            rates = list(self.rungs[0].losses)
            rows = [["lr", *sizes]]
            smallest = [min(rung.losses.values()) for rung in self.rungs]
            for rate in rates:
                losses = [rung.losses[rate] for rung in self.rungs]
                pairs = zip(losses, smallest, strict=True)
                rows.append([rate, *(f"{loss:.4f}{'*' if loss == least else ' '}" for loss, least in pairs)])
            yield f"\nloss by learning rate, * is the lowest of its {self.dimension}"
            yield format_table(rows, left=())
        yield "\nloss by compute"
        yield format_table(
            [
                ["", *sizes],
                ["flops", *(f"{rung.flops:.3g}" for rung in self.rungs)],
                ["loss", *(f"{rung.loss:.4f}" for rung in self.rungs)],
            ],
            left=(),
        )
        if (fit := self.fit) is not None:
            interval = f"95% interval {fit.exponent_low:+.4f} to {fit.exponent_high:+.4f}"
            yield f"loss = {fit.coefficient:.4g} * flops ** {fit.exponent:+.4f}, {interval}"

    def _draw_svg(self) -> str:
        """Draw the coordinate check and the losses by compute as SVG."""
        outputs = {layer: [(rung.multiple, rung.rms[layer]) for rung in self.rungs] for layer in self.slopes}
        panels = [Panel("root mean square of outputs, by layer", f"{self.dimension}, multiple", outputs)]
        losses = {"loss": [(rung.flops, rung.loss) for rung in self.rungs]}
        if self.fit is None:
            panels.append(Panel("loss", "flops", losses))
        else:
            ends = [self.rungs[0].flops, self.rungs[-1].flops]
            losses["fit"] = [(flops, self.fit.value_at(flops)) for flops in ends]
            interval = f"{self.fit.exponent_low:+.3f} to {self.fit.exponent_high:+.3f}"
            title = f"loss, exponent {self.fit.exponent:+.3f} (95%: {interval})"
            panels.append(Panel(title, "flops", losses, frozenset({"fit"})))
        return draw_svg_panels(self._title, panels)

    @property
    def _title(self) -> str:
        return f"rms of outputs after {self.steps} steps ({self.parametrization})"


@command
class LadderCommand(RecipeCommand):
    """A training for every size, with fitted slopes and losses."""

    epilog: ClassVar[str] = (
        "Set single values with node.key=value. --format svg draws the coordinate check and the fit."
    )

    recipe: str = argument("the smallest model: model.granite, model.llama or model.qwen3.dense")
    multiples: Sequence[Count] = option("sizes as multiples of the recipe's", default=(1, 2, 4, 8), separator=",")
    dimension: Dimension = option("size to multiply: width (heads) or depth (layers)", default="width")
    parametrization: Literal["mup", "completep", "standard"] = option("scaling of the model", default="mup")
    steps: Count = option("steps of every size", default=8)
    lr: Sequence[float] = option(
        "also compare these learning rates", default=(), metavar="X,X", separator=",", check=above(0)
    )
    to: Path | None = option("write an overlay per size, such as x4.toml", metavar="FOLDER")

    def run(self, project: Project) -> LadderResult:
        recipe = self.load_recipe(project, self.recipe)
        recipe.check()
        multiples = sorted(set(self.multiples))
        if len(multiples) < 2:
            raise UserError("--multiples: one size has no slope; write two or more, such as 1,2,4", 2)
        sizes = {
            multiple: make_scaled_model_overlay(recipe.graph, multiple, self.dimension, self.parametrization)
            for multiple in multiples
        }
        rungs = []
        for multiple, values in sizes.items():
            scaled = recipe.with_values(values)
            scaled.check()
            head = f"{multiple} times the {self.dimension} of {self.recipe}, {self.parametrization}."
            text = format_overlay(values, head)
            rungs.append(self._train_and_measure_rung(scaled, multiple, text))
        if self.to is not None:
            self.to.mkdir(parents=True, exist_ok=True)
            for rung in rungs:
                write_file(self.to / f"x{rung.multiple}.toml", rung.overlay.encode())
        logs = [math.log(rung.multiple) for rung in rungs]
        slopes = {
            layer: statistics.linear_regression(logs, [math.log(rung.rms[layer]) for rung in rungs]).slope
            for layer in rungs[0].rms
        }
        flat = all(abs(slope) <= FLAT for slope in slopes.values())
        fit = fit_power_law([(rung.flops, rung.loss) for rung in rungs])
        return LadderResult(self.parametrization, self.dimension, self.steps, rungs, slopes=slopes, flat=flat, fit=fit)

    def _train_and_measure_rung(self, recipe: Recipe, multiple: int, overlay: str) -> LadderRung:
        """Train a size at the recipe's learning rate, and at the rates in --lr."""
        columns, flops = self._train_and_read_metrics(recipe)
        rms = {name.removeprefix(RMS): column.values[-1] for name, column in columns.items() if RMS in name}
        if self.dimension == "depth":  # sizes have no other layer in common
            rms = {LAST_LAYER: rms[max(rms, key=int)]}
        losses = {}
        for rate in self.lr:
            names = [name for name, node in recipe.graph.nodes.items() if node.settings.keys() >= OPTIMIZER_SETTINGS]
            if len(names) != 1:
                raise UserError(f"--lr: the recipe has {len(names)} optimizers like optim.adamw; write one", 2)
            trained, _ = self._train_and_read_metrics(recipe, {names[0]: {"lr": rate}})
            losses[rate] = _average_loss_of_last_quarter(trained)
        best = min(losses, key=lambda rate: losses[rate]) if losses else None
        loss = _average_loss_of_last_quarter(columns) if best is None else losses[best]
        return LadderRung(
            multiple=multiple,
            rms=rms,
            loss=loss,
            flops=flops,
            losses={f"{rate:g}": value for rate, value in losses.items()},
            best_lr=best,
            overlay=overlay,
        )

    def _train_and_read_metrics(self, recipe: Recipe, values: Overlay | None = None) -> tuple[dict[str, Column], float]:
        """Train for some steps in this process, and return the metrics and the operations."""
        root = recipe.project.root
        with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
            own: dict[str, Any] = {
                root: {"steps": self.steps, "on_finish": [], "listeners": []},
                "run": {"folder": str(Path(folder) / "run")},
                "metrics": {MEASURE: {"use": "metrics.activation_rms"}},
            }
            changed = recipe.with_values({**own, **(values or {})}, "ladder")
            [model] = changed.graph.implementers(CountsFlops)
            with changed.open() as run:
                tokens = sum(step.tokens for step in run.steps())
                forward = run[model].forward_flops()
            # Products with parameters only, as in Kaplan et al. 2020, "Scaling laws", section 2.1.
            flops = forward.count_training_flops(tokens, dict.fromkeys(forward.per_pair, 0.0))
            return read_metrics(Path(folder) / "run").columns, flops


def _average_loss_of_last_quarter(columns: Mapping[str, Column]) -> float:
    """Return the mean loss over the last quarter."""
    losses = columns["loss"].values
    return statistics.fmean(losses[-max(1, len(losses) // 4) :])
