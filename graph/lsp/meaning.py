"""The meaning of a key or value in a recipe: a node, setting, edge, component, variable or base."""

import attrs

from drawloom.graph.lsp.cursor import Cursor
from drawloom.graph.lsp.workspace import Analysis, Workspace
from drawloom.graph.problems import KeyPath
from drawloom.graph.recipe.layers import EDIT
from drawloom.graph.recipe.merged import VARIABLE
from drawloom.graph.registry.spec import Field, Spec
from drawloom.graph.wiring.graph import Graph
from drawloom.graph.wiring.node import format_path


@attrs.frozen(eq=False)
class Meaning:
    """
    A position in a recipe with its node, and the path inside the node. In an edit, node and path of the edited list.

    `spec` is the component of the node. If only the base of an overlay contains the node, `spec` is the component used
    for it in shipped recipes.
    """

    cursor: Cursor
    analysis: Analysis
    node: str
    path: KeyPath
    spec: Spec | None

    @classmethod
    def from_cursor(cls, workspace: Workspace, analysis: Analysis, cursor: Cursor) -> "Meaning":
        """Return a token's meaning, based on the last successful analysis of the recipe."""
        path = cursor.path[1:] if cursor.path[:1] == (EDIT,) else cursor.path
        nodes = analysis.graph.nodes
        for length in range(len(path), 0, -1):
            if (name := format_path(path[:length])) in nodes:
                return cls(cursor, analysis, name, path[length:], nodes[name].spec)
        name = str(path[0]) if path else ""
        specs = [workspace.project.registry.find(use) for use in workspace.shipped_components_by_node.get(name, ())]
        spec = next((spec for spec in specs if isinstance(spec, Spec)), None)
        return cls(cursor, analysis, name if spec else "", path[1:] if spec else path, spec)

    @property
    def graph(self) -> Graph:
        return self.analysis.graph

    @property
    def field(self) -> Field | None:
        """The setting or edge at the position."""
        return self.spec.fields.get(str(self.path[0])) if self.spec and self.path else None

    @property
    def use(self) -> str:
        """The name of the component at the position, or an empty string."""
        is_use = self.cursor.kind == "value" and self.cursor.path[-1:] == ("use",)
        return self.cursor.written if is_use else ""

    @property
    def reference_target(self) -> str:
        """The node or group named by the token, without "@" and ".*", or an empty string."""
        written = self.cursor.written
        return written[1:].removesuffix(".*") if self.cursor.quoted and written[:1] == "@" != written[1:2] else ""

    @property
    def variable(self) -> str:
        """The variable set or used at the position, or an empty string."""
        if self.cursor.path[:1] == ("vars",) and self.cursor.kind == "key":
            return self.cursor.written
        written = self.cursor.written if self.cursor.kind == "value" else ""
        return written.removeprefix(VARIABLE) if written.startswith(VARIABLE) else ""

    @property
    def extended_recipe_name(self) -> str:
        """The extended recipe at the position, or an empty string."""
        return self.cursor.written if self.cursor.kind == "value" and self.cursor.path[:1] == ("extends",) else ""
