"""The recipe that a graph was built from, as data that a component can be given."""

from collections.abc import Callable

import attrs

from drawloom.graph.component import Change


@attrs.frozen
class RecipeChange:
    """One difference between two recipes: a node, a key of it (empty: the node itself), and how much it weighs."""

    node: str
    key: str
    old: str
    new: str
    kind: Change

    def __str__(self) -> str:
        what = f"[{self.node}] {self.key}".rstrip()
        return f"{what}: {self.old} -> {self.new} ({self.kind})"


def _no_changes(_older: str) -> list[RecipeChange]:
    return []


@attrs.frozen
class ResolvedRecipe:
    """
    The recipe that this graph was built from, as text that can be read again. The container fills in such fields.

    `changes` tells what differs between an older resolved recipe and this one; `accept_changes` says that whoever
    runs it wants to go on whatever differs.
    """

    text: str
    hash: str
    accept_changes: bool = False
    changes: Callable[[str], list[RecipeChange]] = attrs.field(default=_no_changes, eq=False)
