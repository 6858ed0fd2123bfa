"""measure what float8 does to the gradients, layer by layer, and write an overlay that excludes the worst layers"""

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from drawloom import above, at_least
from drawloom.components.commands._options import check_new_file, write_file
from drawloom.components.commands._recipes import find_only_node
from drawloom.components.float8.layers import Float8Experts, Float8Linear, enable_float8, get_float8_weights
from drawloom.graph.cli.command import (
    Project,
    Recipe,
    RecipeCommand,
    Result,
    UserError,
    argument,
    command,
    option,
    output,
    output_class,
)
from drawloom.kernels.float8.eager import Float8Kernels
from drawloom.ports import (
    Batch,
    Executor,
    Parameters,
    Precision,
    Stages,
    Step,
    create_step_state,
    put_class_back,
    sum_losses_and_weights,
)

MIN_MEDIAN = 1e-12
"""Smallest median error that errors are compared with, for a model whose gradients float8 does not change."""


@output_class
class PrecisionResult(Result):
    """An overlay that excludes layers from float8."""

    overlay: str = output("overlay in TOML, with the evidence as comments")
    path: Path | None = output("written file, with --to only")

    def render(self, format: str) -> str:
        """Return the overlay, or the path to it."""
        return f"wrote {self.path}" if self.path else self.overlay.removesuffix("\n")


@command
class PrecisionCommand(RecipeCommand):
    """An overlay after a brief training, from the gradients' errors with float8 by layer."""

    recipe: str = argument("a recipe for one device: a path, or a shipped name")
    steps: int = option("training steps before measuring", default=20, check=at_least(0))
    tolerance: float = option(
        "exclude layers whose error exceeds X times the median", default=3.0, metavar="X", check=above(0)
    )
    to: Path | None = option("overlay to write (default: print it)", metavar="FILE", check=check_new_file)

    def run(self, project: Project) -> PrecisionResult:
        recipe = self.load_recipe(project, self.recipe)
        node = find_only_node(recipe.graph, Precision)
        nodes = recipe.graph.nodes.values()
        feature = next((feature.name for feature in nodes if feature.spec.use == "float8.training"), "float8")
        float8 = {node: {"compute": "bfloat16"}, feature: {"use": "float8.training", "exclude": []}}
        effects = _train_and_measure_float8_effects(recipe.with_values(float8), self.steps)
        text = format_float8_overlay(effects, node, feature, self.recipe, self.steps, self.tolerance)
        if self.to is not None:
            write_file(self.to, text.encode())
        return PrecisionResult(text, self.to)


@attrs.frozen
class Effect:
    """
    Effect of float8 in some layers: the relative error of the whole gradient, and the change of the mean loss.

    `seconds` is the time of a forward and a backward pass over the step's microbatches.
    """

    error: float
    loss: float
    seconds: float


@attrs.frozen
class Float8Effects:
    """Effects of float8 in each layer alone and in all layers, and the loss and seconds of a pass without float8."""

    alone: Mapping[str, Effect]
    together: Effect
    loss: float
    seconds: float

    def find_layers_above_median_error(self, tolerance: float) -> list[str]:
        """Return the layers whose gradient error alone exceeds `tolerance` times the median over layers."""
        median = max(statistics.median(effect.error for effect in self.alone.values()), MIN_MEDIAN)
        return [name for name, effect in self.alone.items() if not effect.error <= tolerance * median]


def format_float8_overlay(
    effects: Float8Effects, precision: str, feature: str, recipe: str, steps: int, tolerance: float
) -> str:
    """Return an overlay for the nodes of precision and float8, with the evidence as comments."""
    together, excluded = effects.together, effects.find_layers_above_median_error(tolerance)
    count = f"{len(excluded)} of {len(effects.alone)} layers"
    lines = [
        f"# Float8 in the linear layers of {recipe}, measured after {steps} steps on one step's rows.",
        f"# All layers: error of the gradient {together.error:.2%}, loss {effects.loss:.4f} {together.loss:+.5f},",
        f"# forward and backward {together.seconds:.3g} s instead of {effects.seconds:.3g} s.",
        f"# Excluded: {count}, those with more than {tolerance:g} times the median error.",
        "#",
        "# error of the gradient, and change of the loss and of the time, with float8 in one layer alone, largest",
        "# error first; layers with one input, and whole feed-forward networks, save more time together:",
    ]
    for name, effect in sorted(effects.alone.items(), key=lambda item: -item[1].error):
        change = 1e3 * (effect.seconds - effects.seconds)
        lines.append(f"# {effect.error:8.3%} {effect.loss:+.6f} {change:+8.3f} ms {name}")
    lines += ["", f"[{precision}]", 'compute = "bfloat16"', "", f"[{feature}]", 'use = "float8.training"']
    if excluded:
        lines += ["exclude = [", *(f'    "{name}",' for name in excluded), "]"]
    return "\n".join([*lines, ""])


def _train_and_measure_float8_effects(recipe: Recipe, steps: int) -> Float8Effects:
    """Train for some steps in the compute dtype, and measure the effects on the next step's gradients."""
    phases = _list_phases_through_update(recipe)
    names = [find_only_node(recipe.graph, port) for port in (Stages, Parameters, Executor)]
    with recipe.open([*names, *phases]) as objects:
        stages, parameters, executor = (objects[name] for name in names)
        layers = {
            name: layer
            for stage in stages.local
            for name, layer in stage.module.named_modules()
            if isinstance(layer, Float8Linear | Float8Experts)
        }
        if not layers:
            raise UserError(f"no layer of {recipe} can use float8", 2)
        kernels = next(iter(layers.values())).float8
        for layer in layers.values():
            put_class_back(layer)
        for index in range(1, steps + 2):
            step = Step(index, steps + 1)
            for name in phases if index <= steps else phases[:1]:
                objects[name].run_phase(step)
        return _Probe(parameters, executor, step.state["batches"], layers, kernels).measure_layers_alone_and_together()


def _list_phases_through_update(recipe: Recipe) -> list[str]:
    """Return the names of the trainer's phases up to the update of the weights."""
    graph = recipe.graph
    graph.require_valid()
    root = graph.nodes[recipe.project.root]
    targets = root.edges["phases"].targets if "phases" in root.edges else ()
    updates = [number for number, name in enumerate(targets) if "weights" in graph.nodes[name].spec.traits.flow.writes]
    if not updates:
        raise UserError("no phase of the recipe updates weights", 2)
    return list(targets[: updates[-1] + 1])


class _MeasuredPass(NamedTuple):
    """A pass's mean loss, gradients (any shape) and seconds."""

    loss: float
    gradients: list[Tensor]
    seconds: float


@attrs.frozen
class _Probe:
    """Measurement of float8's effects: passes over the same microbatches, with float8 in different layers."""

    parameters: Parameters
    executor: Executor
    batches: Sequence[Batch]
    layers: Mapping[str, Float8Linear | Float8Experts]
    kernels: Float8Kernels

    def measure_layers_alone_and_together(self) -> Float8Effects:
        """Measure no layer, all layers, and each layer alone."""
        self._run_pass_in_float8([])  # compiles and allocates
        loss, gradients, seconds = self._run_pass_in_float8([])

        def measure_effect(layers: Sequence[Float8Linear | Float8Experts]) -> Effect:
            other_loss, others, time_of_pass = self._run_pass_in_float8(layers)
            return Effect(relative_error(others, gradients), other_loss - loss, time_of_pass)

        measure_effect([*self.layers.values()])
        for layer in {
            tuple(weight.shape for weight in get_float8_weights(layer).values()): layer
            for layer in self.layers.values()
        }.values():
            measure_effect([layer])  # compiles the casts of its shape
        together = measure_effect([*self.layers.values()])
        return Float8Effects(
            {name: measure_effect([layer]) for name, layer in self.layers.items()}, together, loss, seconds
        )

    def _run_pass_in_float8(self, float8_layers: Sequence[Float8Linear | Float8Experts]) -> _MeasuredPass:
        """Run and measure a pass with float8 in these layers."""
        parameters = [parameter for _, parameter in self.parameters.named_parameters()]
        for parameter in parameters:
            parameter.grad = None
        for layer in float8_layers:
            enable_float8(layer, self.kernels)
        begin = time.monotonic()
        state = create_step_state(self.batches)
        self.executor.run_forward_and_backward(state)
        loss, weight = sum_losses_and_weights(state).tolist()  # waits for the device
        seconds = time.monotonic() - begin
        for layer in float8_layers:
            put_class_back(layer)
        gradients = [torch.zeros_like(part) if part.grad is None else part.grad.detach() for part in parameters]
        for parameter in parameters:
            parameter.grad = None
        return _MeasuredPass(loss / weight, gradients, seconds)


def relative_error(gradients: Sequence[Tensor], exact_gradients: Sequence[Tensor]) -> float:
    """Return the norm of the gradients' difference (any shapes), divided by the norm of `exact_gradients`."""
    difference = sum(
        _sum_squares(gradient.double() - other) for gradient, other in zip(gradients, exact_gradients, strict=True)
    )
    return float((difference / sum(map(_sum_squares, exact_gradients))) ** 0.5)


def _sum_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares, float64 ()."""
    return tensor.double().square().sum()
