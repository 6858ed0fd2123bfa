"""Checks of a training recipe: its length, the numbers in settings of phases, and the batch leaves that nodes read."""

from collections.abc import Iterator

from drawloom import NodeView, Problem
from drawloom.graph.component import find_declared_reads_and_writes
from drawloom.graph.problems import did_you_mean
from drawloom.ports import (
    IN_PARAMETERS,
    STEP_SPECS,
    Epochs,
    Metric,
    NamesNumbers,
    Phase,
    PlannedPhase,
    ReadsLeaves,
    find_batch_types,
)


def check_training_recipe(trainer: NodeView) -> Iterator[Problem]:
    """Yield all problems."""
    yield from check_leaves_and_metrics(trainer)
    yield from check_lengths(trainer)
    yield from find_missing_numbers(trainer)


def check_leaves_and_metrics(trainer: NodeView) -> Iterator[Problem]:
    """
    Yield a problem for every component with a leaf missing from the run's batches, and for a metric without its phase.

    A phase that makes batches, such as rollouts, replaces the data set's batches.
    """
    phases = {node.name for node in trainer.neighbours("phases")}
    writers = [*find_batch_types(trainer)]
    writers = [writer for writer in writers if writer[0].name in phases] or writers
    for reader in trainer.reachable():
        leaves = reader.component.batch_leaves if isinstance(reader.component, ReadsLeaves) else ()
        for writer, batch_type in writers:
            if missing := [name for name in leaves if name not in batch_type.specs]:
                plural = "leaves" if len(missing) > 1 else "leaf"
                text = (
                    f"[{reader.name}] reads the {plural} {', '.join(missing)} of batches, and [{writer.name}] makes "
                    f"{batch_type.__name__}, which has {', '.join(batch_type.specs)}"
                )
                yield reader.problem("use", text, f"use another component in [{reader.name}] or in [{writer.name}]")
        if reader.name not in phases and reader.implements(Metric) and reader.implements(Phase):
            text = f"the metric measures in a phase, and is not among the phases of [{trainer.name}]"
            hint = f'write before."@optimizer" = "@{reader.name}" in [edit.{trainer.name}.phases]'
            yield reader.problem("use", text, hint)


def check_lengths(node: NodeView) -> Iterator[Problem]:
    """Report a missing length, plans longer than the run, and lengths in epochs if no data counts them."""
    if node.settings["steps"] is None and node.settings["epochs"] is None:
        yield node.problem("use", "neither steps nor epochs is set", "write steps = 1000 or epochs = 3.0")
    for phase in node.neighbours("phases"):
        if issubclass(phase.component, PlannedPhase) and node.settings["steps"]:
            yield from phase.component.check_total_steps(phase, node.settings["steps"])
    text, hint = "no data of the run counts epochs", "write a number of steps, or let data.loader read the data"
    if node.neighbour("epoch_counter"):
        return
    if node.settings["epochs"] is not None:
        yield node.problem("epochs", text, hint)
    for phase in node.neighbours("phases"):
        if (every := phase.settings.get("every")) == "epoch" or isinstance(every, Epochs):
            yield phase.problem("every", text, hint)


def find_missing_numbers(node: NodeView) -> Iterator[Problem]:
    """Report settings of phases with the name of a number and no phase to write it."""
    phases = node.neighbours("phases")
    written = {
        value
        for phase in phases
        if phase.settings.get("every") != "never"
        for value in find_declared_reads_and_writes(phase.component).writes
    }
    for phase in phases:
        reads = (value.removesuffix("?") for value in find_declared_reads_and_writes(phase.component).reads)
        known = {*written, *reads} - IN_PARAMETERS - STEP_SPECS.keys()
        for key in phase.component.number_settings if isinstance(phase.component, NamesNumbers) else ():
            value = phase.settings[key]
            text = f"no phase of [{node.name}] writes a number {value!r}"
            if value is not None and value not in known:
                yield phase.problem(key, text, did_you_mean(value, known))
            elif value is not None and value not in written:
                # Only a warning: the setting may come from a recipe that this one extends.
                hint = f'add a phase that does, or write unset = ["{phase.name}.{key}"]'
                yield phase.warning(key, f"{text}, so that {key!r} does nothing", hint)
