"""What is open, and how it is closed: last opened first, every one, whatever fails."""

from collections.abc import Callable

import attrs

Close = Callable[[], None]


@attrs.define
class NamedExitStack:
    """A stack of things to close, by name."""

    _stack: list[tuple[str, Close]] = attrs.field(factory=list, init=False)

    def push(self, name: str, close: Close) -> None:
        """Close this one before all that were pushed earlier."""
        self._stack.append((name, close))

    def close_all(self, cause: BaseException | None) -> None:
        """
        Run every closer. With a cause, failures become notes on it, and whoever handles it raises it.

        Without one: an interruption or exit that came while closing goes on as itself, with the other failures as
        notes; failures alone are raised together, as an ExceptionGroup.
        """
        failures: list[BaseException] = []
        while self._stack:
            name, close = self._stack.pop()
            try:
                close()
            except BaseException as error:
                error.add_note(f"while closing [{name}]")
                failures.append(error)
        if cause is None:
            cause = next((error for error in failures if not isinstance(error, Exception)), None)
            if cause is not None:
                _note(cause, [failure for failure in failures if failure is not cause])
                raise cause
            if failures:
                raise ExceptionGroup("closing failed", [error for error in failures if isinstance(error, Exception)])
        else:
            _note(cause, failures)


def _note(cause: BaseException, failures: list[BaseException]) -> None:
    for failure in failures:
        cause.add_note(f"then: {type(failure).__name__}: {failure} ({'; '.join(failure.__notes__)})")
