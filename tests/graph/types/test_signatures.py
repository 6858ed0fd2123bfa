"""Whether one function can be called as another."""

import inspect
from collections.abc import Callable
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drawloom.graph.types.signatures import call_mismatch

NAMES = ("a", "b", "c")
KINDS = ("", "=0")


@st.composite
def functions(draw: st.DrawFn) -> Callable[..., Any]:
    """A method with any mixture of parameters."""
    before = [f"{name}" for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))]
    only_places = draw(st.integers(0, len(before)))
    plain = draw(st.integers(only_places, len(before)))
    optional = draw(st.integers(0, plain))
    words = [f"{name}=0" if number >= optional else name for number, name in enumerate(before[:plain])]
    if only_places:
        words.insert(only_places, "/")
    star = draw(st.booleans())
    names = [name + draw(st.sampled_from(KINDS)) for name in before[plain:]]
    words += ["*rest"] if star else ["*"] if names else []
    words += names + (["**more"] if draw(st.booleans()) else [])
    space: dict[str, Any] = {}
    exec(f"def f({', '.join(['self', *words])}): return None", space)
    function: Callable[..., Any] = space["f"]
    return function


def shown(function: Callable[..., Any]) -> str:
    """For the report of a failure."""
    return str(inspect.signature(function))


def calls() -> list[tuple[tuple[int, ...], dict[str, int]]]:
    """All ways to call with up to four places, and any of the names and one more."""
    named: list[dict[str, int]] = [{}]
    named += [dict.fromkeys(NAMES[:n], 1) for n in (1, 2, 3)] + [{n: 1} for n in "bcx"] + [{"a": 1, "c": 1}]
    named += [{"b": 1, "c": 1}, {"a": 1, "x": 1}]
    return [((0,) * places, names) for places in range(5) for names in named]


def allows(function: Callable[..., Any], call: tuple[tuple[int, ...], dict[str, int]]) -> bool:
    """Whether a call is accepted."""
    try:
        function(None, *call[0], **call[1])
    except TypeError:
        return False
    return True


@settings(max_examples=500, deadline=None)
@given(functions(), functions())
def test_what_fits_takes_every_call(given: Callable[..., Any], promised: Callable[..., Any]) -> None:
    """If nothing is wrong, every call that the promise allows is taken; if something is, some call is not."""
    assume("**more" not in shown(promised))  # whose names may be those of our parameters, and be given twice
    broken = [call for call in calls() if allows(promised, call) and not allows(given, call)]
    if not call_mismatch(given, promised):
        assert not broken, f"{shown(given)} for {shown(promised)}"
    else:
        others = [name for name in inspect.signature(given).parameters if name not in NAMES]
        assert broken or others or _differs_by_place(given, promised), f"{shown(given)} for {shown(promised)}"


def _differs_by_place(given: Callable[..., Any], promised: Callable[..., Any]) -> bool:
    """The same number of parameters at other places: every call binds, but to the wrong ones."""
    return list(inspect.signature(given).parameters) != list(inspect.signature(promised).parameters)


def test_a_coroutine_is_no_function() -> None:
    """What is awaited can't stand for what is called, nor the other way."""

    async def later(self: Any) -> None: ...

    def now(self: Any) -> None: ...

    assert call_mismatch(later, now) == "has now() as a coroutine"
    assert call_mismatch(now, later) == "has later() not as a coroutine"
