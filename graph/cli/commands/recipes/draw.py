"""draw the nodes of a run, or the dataflow of one step"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from drawloom.graph.cli.command import (
    JSON,
    Project,
    Recipe,
    RecipeCommand,
    Result,
    command,
    internal,
    option,
    output,
    output_class,
)
from drawloom.graph.drawing import FORMATS, Format


@output_class
class NodeData:
    """A node."""

    name: str = output("name in the recipe")
    use: str = output("component")
    edges: Mapping[str, Sequence[str]] = output("target nodes by field")
    reads: Sequence[str] = output("values of a step that the node reads; `?` marks optional ones")
    changes: Sequence[str] = output("values of a step that it changes")
    writes: Sequence[str] = output("values of a step that it writes")

    @classmethod
    def from_node(cls, node: Any) -> "NodeData":
        """Describe a node."""
        flow = node.spec.traits.flow
        edges = {key: list(edge.targets) for key, edge in node.edges.items()}
        return cls(node.name, node.spec.use, edges, list(flow.reads), list(flow.changes), list(flow.writes))


@output_class
class DrawResult(Result):
    """Nodes needed by a run; `focus` and `step` apply to pictures."""

    formats: ClassVar[tuple[str, ...]] = (*FORMATS, JSON)

    nodes: Sequence[NodeData] = output("nodes in the order of building")
    recipe: Recipe = internal()
    focus: str = internal()
    step: bool = internal()

    def render(self, format: str) -> str:
        """Return a text tree, or a picture as Mermaid, DOT or SVG."""
        kind: Format = next(known for known in FORMATS if known == format)
        return self.recipe.draw(kind, self.focus, step=self.step).removesuffix("\n")


@command
class DrawCommand(RecipeCommand):
    """A recipe's drawing."""

    focus: str = option("draw only this node, its dependencies and its users", default="", metavar="NODE")
    step: bool = option("draw the dataflow of one step: values read, changed and written by the phases")

    def run(self, project: Project) -> DrawResult:
        recipe = self.load_checked_recipe_and_warn(project, self.recipe)
        graph = recipe.graph.require_valid()
        nodes = [NodeData.from_node(graph.nodes[name]) for name in graph.topological_order([graph.root])]
        return DrawResult(nodes, recipe, self.focus, self.step)
