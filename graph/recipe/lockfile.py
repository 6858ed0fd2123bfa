"""The recipe that a graph was built from, as data that a component can be given."""

from collections.abc import Callable
from functools import cached_property
from typing import Literal

import attrs

from drawloom.graph.setting import Change

LOCK = "recipe.lock.toml"
"""The file in a run folder that holds the resolved recipe of the run."""


Impact = Change | Literal["cosmetic"]
"""How much a difference matters to a run that goes on; a cosmetic one is in how a recipe is written."""


@attrs.frozen
class RecipeChange:
    """
    One difference between two recipes: a node, a key of it (empty: the node itself), and how much it weighs.

    `edge` says that the key leads to nodes. What is not there is "absent". Without a node it is about the whole.
    """

    node: str
    key: str
    old: str
    new: str
    kind: Impact
    edge: bool = False

    def __str__(self) -> str:
        return f"{f'[{self.node}] {self._what()}' if self.node else f'{self.old}: {self.new}'} ({self.kind})"

    def _what(self) -> str:
        if not self.key:
            return f"added: {self.new}" if self.old == "absent" else f"removed: {self.old}"
        verb = "swapped" if self.key == "use" else f"{self.key} moved" if self.edge else self.key
        return f"{verb}: {self.old} -> {self.new}"


def _no_changes(_older: str) -> list[RecipeChange]:
    return []


@attrs.frozen(eq=False)
class ResolvedRecipe:
    """
    The recipe that this graph was built from, as text that can be read again. The container fills in such fields.

    `hash` is equal for recipes that say the same. Both may be given as functions, which are called when somebody first
    asks: to write a recipe out takes as long as to read it. `changes` tells what differs between an older resolved
    recipe and this one; `accept_changes` says that whoever runs it wants to go on whatever differs.
    """

    _text: str | Callable[[], str]
    _hash: str | Callable[[], str]
    accept_changes: bool = False
    changes: Callable[[str], list[RecipeChange]] = _no_changes

    @cached_property
    def text(self) -> str:
        """TOML 1.0."""
        return self._text if isinstance(self._text, str) else self._text()

    @cached_property
    def hash(self) -> str:
        """64 hexadecimal digits."""
        return self._hash if isinstance(self._hash, str) else self._hash()
