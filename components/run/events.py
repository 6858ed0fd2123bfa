"""Dispatches events to listeners, which can't influence the run."""

from functools import cached_property
from typing import get_args

from drawloom import Every, component, internal
from drawloom.ports import Event, EventKind, Listener, list_observed_event_kinds, run_log

KINDS = get_args(EventKind)


@component(impact="safe")
class EventDispatcher:
    """Event dispatcher for the graph's listeners; a listener that raises gets no further events."""

    listeners: Every[Listener]

    _dropped: set[str] = internal(factory=set)

    @cached_property
    def _observers(self) -> dict[EventKind, list[tuple[str, Listener]]]:
        """Name and listener of every observer, by kind of event."""
        listeners = [(item, list_observed_event_kinds(item[1])) for item in self.listeners.items()]
        return {kind: [item for item, observed in listeners if kind in observed] for kind in KINDS}

    def emit(self, event: Event) -> None:
        for name, listener in self._observers[event.kind]:
            if name in self._dropped:
                continue
            try:
                listener.on_event(event)
            except Exception:
                self._dropped.add(name)
                run_log.exception("[%s] failed at %s and gets no more events; the run continues", name, event.kind)
