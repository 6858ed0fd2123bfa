"""Events on their way to listeners, who can't steer the run."""

import logging

import attrs

from drawloom.components.ports.run import Event, Listener
from drawloom.graph import Every, component

log = logging.getLogger("drawloom.run")


@component(impact="safe")
class Dispatcher:
    """Tells every listener of the graph; one that fails is not told again, and the run goes on."""

    listeners: Every[Listener]

    _dropped: set[str] = attrs.field(init=False, factory=set)

    def emit(self, event: Event) -> None:
        """Tell all listeners, one after another."""
        for name, listener in self.listeners.items():
            if name not in self._dropped:
                self._tell(name, listener, event)

    def _tell(self, name: str, listener: Listener, event: Event) -> None:
        try:
            listener.on_event(event)
        except Exception:
            self._dropped.add(name)
            log.exception("[%s] failed at %s and is told nothing more; the run goes on", name, event.kind)
