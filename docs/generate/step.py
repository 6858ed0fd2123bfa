"""The page of a step: its phases, the values that they pass on, the events around them, and what a loss gives."""

import ast
from collections.abc import Iterator
from typing import get_args

from drawloom import Recipe
from drawloom.components.ports.run import EventKind
from generate.catalogue import anchor, component_link, specs
from generate.components import cell
from generate.source import ROOT, modules

PICTURE = ROOT / "docs" / "pictures" / "first_run_step.svg"

VALUES = {
    "batches": "list of `Batch`: this rank's microbatches of the step",
    "grad_norm": "float64 (): the L2 norm of all gradients of the model",
    "gradients": "in the `.grad` of `Parameters.named_parameters()`: the mean by weight over all tokens of all ranks",
    "local_gradients": "in `.grad` of `Parameters.named_parameters()`: sums over a rank's microbatches, not divided",
    "loss": "float64 (): the mean loss by weight, in nats per token",
    "loss_weight": "float64 (): the sum of the weights of all tokens",
    "losses": "dict: `loss` and `weight` (microbatches,), and `sums`, further sums of the loss by name; of 0 "
    "microbatches on ranks without the last stage",
    "lr": "float: the learning rate of this step, the base times `lr_factor`",
    "lr_factor": "float: the multiplier of the base learning rate; 1 without a schedule",
    "metric_totals": "dict of float64 (numbers,): the totals of all metrics over ranks, by op",
    "rollouts": "list of `Scored`: this rank's sampled completions with their rewards, by microbatch",
    "skip": "float32 (): 1 if the update is skipped, else 0",
    "tokens": "float64 (): the tokens of the step on all ranks, without padding",
    "validation_loss": "float: the mean loss of the validation split, in nats for a token; in steps that evaluate",
    "validation_cross_entropy": "float: the mean cross entropy of the validation split, if the loss sums it",
    "initial_validation_loss": "float: the same before the first step; in the first step of a run that evaluates then",
    "validation_reward": "float: the mean reward of completions of the validation prompts; in steps that evaluate",
    "initial_validation_reward": "float: the same before the first step",
    "weights": "the parameters themselves: what the next step computes with",
}
"""What each value of a step is; values without a type here are in the parameters, not in `step.state`."""

EVENTS = {
    "run_started": "before the first step, when all nodes are open and before a checkpoint is restored",
    "step_started": "before the first phase of a step",
    "phase_started": "before a phase, whose node is `event.phase`",
    "data_loaded": "when the microbatches of the step are loaded, in the phase that trains on them",
    "phase_ended": "after a phase, whose node is `event.phase`",
    "step_ended": "after the last phase of a step",
    "saving_started": "before a checkpoint is saved, in the phase that does it or when the run stops",
    "saving_ended": "when training continues, though files may still be written in the background",
    "run_ended": "after the last step and the final tasks; not if the run fails or is stopped",
}

TEXT = """\
# A training step

`[trainer]` runs its `phases` in the order of the list, once a step. A phase is a component with `run_phase(step)`; it
reads and writes values of `step.state`, and declares them in `@component(reads=..., writes=..., changes=...)`.
`drawloom check` refuses an order in which a value is read before it is written, or changed after its last reader.
`drawloom draw RECIPE --step` draws it:

![the step of first_run](pictures/first_run_step.svg)

A `?` after a name in `reads` means: if some phase writes it.

## Values

| value | what it is | written by | changed by | read by |
|---|---|---|---|---|
"""

AFTER_VALUES = """
A value of your own needs no other declaration: a phase writes it, other phases name it in `reads`. A number is a float
or a float tensor of shape (); `step.state.number(name)` returns it as a float, and waits for a GPU if necessary.
`step.state.microbatch(i)` is the view of one microbatch, in which `batches` and `losses` are read and written.
`step.skip(reason)` and `step.skip_update_if(condition, reason)` skip the update. A metric gets the same `step`, after
all phases that come before `[report]`. `step.index` counts from 1, `step.total` is the number of steps, `step.tokens`
the tokens on all ranks, and `step.skip_reason` is why the update is skipped, empty if it is not.

## Events

Listeners (`[listeners.*]`) get events around phases. They only observe: their exceptions are logged, and training
continues.

| event | when | sent by |
|---|---|---|
"""

LOSS = """
An `Event` has its `kind`, the `step` if there is one, and the name of the `phase`.

## What a loss gives

`[loss]` is called once for each microbatch, on the rank of the last stage, inside of that stage's forward pass. It
gives three things:

1. the sum of the weighted losses of all tokens, 0-dimensional, to be differentiated;
2. the sum of the weights, 0-dimensional;
3. further sums by name, a dict: 0-dimensional tensors, or counts of a fixed shape. Metrics such as `metrics.mean` read
   them, and divide them by the sum of the weights.

`[sync_gradients]` divides the gradients by the sum of the weights of all microbatches and ranks, once. So a loss is a
sum over tokens, in which each counts by `batch.weights`, and it is the same on any mesh. See
[`Loss`](ports/pipeline.md#loss), and [a complete one](components.md#a-loss).
"""


def step_page() -> str:
    """Phases, values, events, losses. Raises RuntimeError if a value or an event is not described, or not there."""
    names = set(_named())
    if names != VALUES.keys() or set(get_args(EventKind)) != EVENTS.keys():
        raise RuntimeError(f"docs/generate/step.py describes {sorted(VALUES)}, {sorted(EVENTS)}; there is {names}")
    values = "\n".join(f"| `{name}` | {VALUES[name]} | {' | '.join(_roles(name))} |" for name in sorted(VALUES))
    events = "\n".join(f"| `{kind}` | {cell(when)} | {', '.join(_senders(kind))} |" for kind, when in EVENTS.items())
    return f"{TEXT}{values}\n{AFTER_VALUES}{events}\n{LOSS}"


def step_picture() -> str:
    """Draw a training step of the first run as SVG."""
    return Recipe.load("first_run").draw("svg", step=True)


def _named() -> Iterator[str]:
    for spec in specs():
        flow = spec.traits.flow
        yield from (name.rstrip("?") for name in (*flow.reads, *flow.writes, *flow.changes))


def _roles(name: str) -> Iterator[str]:
    for role in ("writes", "changes", "reads"):
        using = [(spec, getattr(spec.traits.flow, role)) for spec in specs()]
        yield ", ".join(
            component_link(spec, "") + ("?" if f"{name}?" in names else "")
            for spec, names in using
            if {name, f"{name}?"} & {*names}
        )


def _senders(kind: str) -> Iterator[str]:
    """The files that make an event of this kind."""
    for file, module in modules().items():
        if not file.startswith("components/contracts/"):
            for node in ast.walk(module.tree):
                match node:
                    case ast.Call(func=ast.Name(id="Event"), args=[ast.Constant(value=made), *_]) if made == kind:
                        use = file.removeprefix("components/").removesuffix(".py").replace("/", ".")
                        yield f"[`{use}`](reference/components/{use.partition('.')[0]}.md#{anchor(use)})"
