"""Recipes of the small shop that nobody would write."""

from datetime import UTC
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,5}", fullmatch=True).filter(
    lambda name: name not in ("vars", "format", "extends", "unset", "edit", "trainer", "store", "page")
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
WHOLE = st.integers(-(2**63), 2**63 - 1)
PARTS = st.floats(min_value=1e-300, max_value=1e300) | st.integers(1, 2**53)


def escape(text: str) -> str:
    """Return a text as a recipe writes it."""
    return text[0] + text if text[:1] in ("@", "$") else text


TEXT = TEXTS.map(escape)
SHELF = st.fixed_dictionaries(
    {"width": st.integers(1, 100)}, optional={"name": TEXT, "books": st.lists(TEXT, max_size=2)}
)
ANYTHING = st.recursive(
    TEXT | WHOLE | st.booleans() | PARTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)

SETTINGS: dict[str, SearchStrategy[Any]] = {
    "text": TEXT,
    "whole": WHOLE,
    "part": PARTS,
    "flag": st.booleans(),
    "path": st.from_regex(r"[\w./ -]{1,8}", fullmatch=True).filter(lambda path: not path.isspace()),
    "moment": st.datetimes() | st.datetimes(timezones=st.just(UTC)),
    "day": st.dates(),
    "hour": st.times(),
    "choice": st.sampled_from(["one", 2, True]),
    "colour": st.sampled_from(["red", "blue"]),
    "either": WHOLE | st.just("rest"),
    "texts": st.lists(TEXT, max_size=3),
    "pair": st.tuples(WHOLE, PARTS).map(list),
    "numbers": st.lists(WHOLE, max_size=3),
    "table": st.dictionaries(TEXTS, PARTS, max_size=2),
    "shelf": SHELF,
    "shelves": st.lists(SHELF, max_size=2),
    "named": st.dictionaries(TEXTS, st.lists(SHELF, max_size=1), max_size=2),
    "anything": ANYTHING,
}
VARIED = st.fixed_dictionaries({"use": st.just("stores.varied")}, optional=SETTINGS)


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a shop: stores with arbitrary settings, pages (inline, or with other pages as fallback), and groups."""
    stores = draw(st.dictionaries(NAMES, VARIED, max_size=3))
    group = draw(st.dictionaries(NAMES, VARIED, max_size=2))
    names = ["store", *stores, *(f"group.{name}" for name in group)]
    pages: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 4))):
        store = draw(st.sampled_from(names).map("@{}".format) | VARIED)
        pages[f"page{number}"] = {"use": "pages.plain", "title": draw(TEXT), "store": store}
        if number and draw(st.booleans()):
            pages[f"page{number}"]["fallback"] = f"@page{draw(st.integers(0, number - 1))}"
    members = draw(st.permutations(list(pages)))
    shop = {
        "store": {"use": "stores.memory", "size": draw(st.integers(1, 99))},
        **stores,
        **pages,
        "trainer": {"use": "servers.loop", "store": "@store", "pages": [f"@{page}" for page in members]},
    }
    return shop | ({"group": group} if group else {})
