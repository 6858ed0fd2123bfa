"""The resolved recipe, which components may take as a field, and how it differs from an older one."""

from collections.abc import Callable
from functools import cached_property
from typing import Literal

import attrs

from drawloom.graph.component import Impact

LOCK = "recipe.lock.toml"
"""The file in a run folder, and in each checkpoint, that holds the resolved recipe of the run."""


@attrs.frozen
class RecipeChange:
    """
    A difference between two recipes: in a node, or in a key of one (empty: the node itself), or in the whole.

    `edge` says that the key is an edge. A value or node that one recipe does not have is "absent". `impact` is what the
    difference means for a run that resumes, and `why`, if its component says so; a cosmetic one is only in how a recipe
    is written.
    """

    node: str
    key: str
    old: str
    new: str
    impact: Impact | Literal["cosmetic"]
    edge: bool = False
    why: str = ""

    def __str__(self) -> str:
        what = f"[{self.node}] {self._what()}" if self.node else f"{self.old}: {self.new}"
        return f"{what} ({self.impact}{f': {self.why}' if self.why else ''})"

    def _what(self) -> str:
        if not self.key:
            return f"added: {self.new}" if self.old == "absent" else f"removed: {self.old}"
        verb = "swapped" if self.key == "use" else f"{self.key} moved" if self.edge else self.key
        return f"{verb}: {self.old} -> {self.new}"


def _find_no_changes(_older: str) -> list[RecipeChange]:
    return []


def _draw_nothing(_step: bool) -> str:
    return ""


@attrs.frozen(eq=False)
class ResolvedRecipe:
    """
    The recipe that a graph was built from; the container fills fields of this type.

    Text and hash may be given as functions, which are called at the first use: to write a recipe takes as long as to
    read it, and most commands do not need it. `accept_changes` says that the user wants to resume whatever has changed.
    `changes` lists what differs from an older resolved recipe, given as text, to this one. `draw` gives the graph, or
    with true the dataflow of one step, as an SVG document.
    """

    _text: str | Callable[[], str]
    _hash: str | Callable[[], str]
    accept_changes: bool = False
    changes: Callable[[str], list[RecipeChange]] = _find_no_changes
    draw: Callable[[bool], str] = _draw_nothing

    @cached_property
    def text(self) -> str:
        """TOML 1.0 that reads back as the same graph."""
        return self._text if isinstance(self._text, str) else self._text()

    @cached_property
    def hash(self) -> str:
        """64 hexadecimal digits, equal for recipes that build the same graph."""
        return self._hash if isinstance(self._hash, str) else self._hash()
