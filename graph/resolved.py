"""The recipe that a graph was built from, as data that a component can be given."""

import attrs

from drawloom.graph.component import Change


@attrs.frozen
class ResolvedRecipe:
    """The recipe that this graph was built from, as text that can be read again. A field of this type is filled in."""

    text: str
    hash: str
    accept_changes: bool = False

    def changes(self, older: str) -> "list[RecipeChange]":
        """What differs between an older resolved recipe and this one."""
        from drawloom.graph.changes import changes

        return changes(older, self.text)


@attrs.frozen
class RecipeChange:
    """One difference between two recipes: a node, a key of it, the two values, and how much it weighs."""

    node: str
    key: str
    old: str
    new: str
    kind: Change

    def __str__(self) -> str:
        return f"[{self.node}] {self.key}: {self.old} -> {self.new} ({self.kind})"
