"""How things are closed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.graph.runtime.exit_stack import NamedExitStack

FAILURES: list[type[BaseException] | None] = [None, ValueError, KeyboardInterrupt, SystemExit]


def opened(failures: list[type[BaseException] | None], closed: list[int]) -> NamedExitStack:
    """Things that tell when they are closed, and then fail as said."""
    stack = NamedExitStack()
    for number, failure in enumerate(failures):

        def close(number: int = number, failure: type[BaseException] | None = failure) -> None:
            closed.append(number)
            if failure:
                raise failure(f"number {number}")

        stack.push(f"thing{number}", close)
    return stack


@given(st.lists(st.sampled_from(FAILURES), max_size=6), st.sampled_from([None, ValueError, KeyboardInterrupt]))
def test_every_closer_runs_and_nothing_is_lost(
    failures: list[type[BaseException] | None], cause: type[BaseException] | None
) -> None:
    """Last opened is first closed, whatever fails; every failure comes out, or stands on what does."""
    closed: list[int] = []
    body = cause("body") if cause else None
    stack = opened(failures, closed)
    raised: BaseException | None = None
    try:
        stack.close_all(body)
    except BaseException as error:
        raised = error
    assert closed == list(reversed(range(len(failures))))
    failed = [f"number {number}" for number in closed if failures[number]]
    stops = [number for number in closed if failures[number] in (KeyboardInterrupt, SystemExit)]
    if body is not None:
        assert raised is None and told(body) == failed
    elif stops:
        assert type(raised) is failures[stops[0]] and str(raised) == f"number {stops[0]}"
        assert told(raised) == [text for text in failed if text != str(raised)]
    elif failed:
        assert isinstance(raised, ExceptionGroup) and [str(error) for error in raised.exceptions] == failed
    else:
        assert raised is None
    stack.close_all(None)  # nothing is closed twice
    assert len(closed) == len(failures)


def told(error: BaseException | None) -> list[str]:
    """What the notes on an exception tell of other failures."""
    notes = getattr(error, "__notes__", [])
    return [note.split(": ")[2].split(" (")[0] for note in notes if note.startswith("then: ")]


def test_a_failure_says_what_was_being_closed() -> None:
    """Each exception of a group names its node."""
    with pytest.raises(ExceptionGroup) as caught:
        opened([ValueError], []).close_all(None)
    assert caught.value.exceptions[0].__notes__ == ["while closing [thing0]"]
