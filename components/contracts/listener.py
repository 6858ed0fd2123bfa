"""What every listener does."""

import typing

from drawloom.components.ports.run import Event, EventKind, Listener, Step


def it_hears_of_everything(listener: Listener) -> None:
    """A whole run of two steps is heard without a word."""
    listener.on_event(Event("run_started"))
    for index in (1, 2):
        step = Step(index, 2, tokens=64, outputs={"loss": 1.5, "grad_norm": 1.0, "lr": 0.1})
        for moment in ("step_started", "phase_started", "phase_ended", "saving_started", "saving_ended", "step_ended"):
            listener.on_event(Event(moment, step, "optimizer" if moment.startswith("phase") else ""))
    listener.on_event(Event("run_ended"))


def it_bears_what_it_does_not_expect(listener: Listener) -> None:
    """Each moment alone, out of order and before any step, is heard without a word."""
    for moment in reversed(typing.get_args(EventKind)):
        listener.on_event(Event(moment, Step(1, 1), "optimizer"))
