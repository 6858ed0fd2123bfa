"""The resolved recipe, which components may receive in a field, and its differences from an older one."""

from collections.abc import Callable
from functools import cached_property
from typing import Literal

import attrs

from drawloom.graph.component import Impact

LOCK = "recipe.lock.toml"
"""File with the resolved recipe, in a run folder and in every checkpoint."""


@attrs.frozen
class RecipeChange:
    """
    Difference between two recipes: in a node, in a key of a node (empty for the node itself), or in the whole recipe.

    `edge` is true if the key is an edge. "absent" stands for a missing value or node. `impact` is the effect on a
    resumed run, and `why` the reason from the component, if any. A cosmetic difference only affects how a recipe is
    written.
    """

    node: str
    key: str
    old: str
    new: str
    impact: Impact | Literal["cosmetic"]
    edge: bool = False
    why: str = ""

    def __str__(self) -> str:
        subject = f"[{self.node}] {self._describe()}" if self.node else f"{self.old}: {self.new}"
        return f"{subject} ({self.impact}{f': {self.why}' if self.why else ''})"

    def _describe(self) -> str:
        if not self.key:
            return f"added: {self.new}" if self.old == "absent" else f"removed: {self.old}"
        verb = "swapped" if self.key == "use" else f"{self.key} moved" if self.edge else self.key
        return f"{verb}: {self.old} -> {self.new}"


@attrs.frozen(eq=False)
class ResolvedRecipe:
    """
    The recipe of a graph. The container fills fields of this type.

    Text, hash and lock file may be functions, called at the first use: writing a recipe takes as long as reading it,
    and most commands need neither. `accept_changes` is true if the user wants to resume despite changes. `changes`
    lists the differences from an older resolved recipe, passed as text, to this one. `draw` returns the graph, or with
    true the dataflow of one step, as an SVG document.
    """

    _text: str | Callable[[], str]
    _hash: str | Callable[[], str]
    accept_changes: bool = False
    changes: Callable[[str], list[RecipeChange]] = lambda _older: []
    draw: Callable[[bool], str] = lambda _step: ""
    _lock: str | Callable[[], str] | None = attrs.field(default=None, kw_only=True)

    @cached_property
    def text(self) -> str:
        """TOML 1.0 from which the same graph can be read."""
        return self._text if isinstance(self._text, str) else self._text()

    @cached_property
    def lock(self) -> str:
        """The content of a lock file: the recipe with relative paths as written, and the folder for them."""
        return self._lock() if callable(self._lock) else self._lock or self.text

    @cached_property
    def hash(self) -> str:
        """64 hexadecimal digits, equal for recipes with the same graph."""
        return self._hash if isinstance(self._hash, str) else self._hash()
