"""Dispatches events to listeners, which can't influence the run."""

import logging

import attrs

from drawloom.components.ports.run import Event, Listener
from drawloom.graph import Every, component

log = logging.getLogger("drawloom.run")


@component(impact="safe")
class Dispatcher:
    """Sends events to every listener of the graph; a listener that raises gets no further events."""

    listeners: Every[Listener]

    _dropped: set[str] = attrs.field(init=False, factory=set)

    def emit(self, event: Event) -> None:
        """Send an event to all listeners, in order."""
        for name, listener in self.listeners.items():
            if name not in self._dropped:
                self._send(name, listener, event)

    def _send(self, name: str, listener: Listener, event: Event) -> None:
        try:
            listener.on_event(event)
        except Exception:
            self._dropped.add(name)
            log.exception("[%s] failed at %s and gets no more events; the run continues", name, event.kind)
