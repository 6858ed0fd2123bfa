"""Results for the commands in graph/cli/commands.py."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from drawloom.graph.cli.exit_codes import INVALID, OK, STOPPED
from drawloom.graph.cli.result import JSON, ProblemData, Result, internal, output, output_class
from drawloom.graph.drawing import FORMATS, Format
from drawloom.graph.inspect.listing import PortListing
from drawloom.graph.inspect.serialize import convert_to_toml_types, serialize_nodes
from drawloom.graph.problems import Problem
from drawloom.graph.project import Recipe
from drawloom.graph.recipe.lockfile import RecipeChange
from drawloom.graph.registry.registry import Registry
from drawloom.graph.registry.spec import Field, Spec
from drawloom.graph.types.describe import describe_type


@output_class
class RunResult(Result):
    """An ended run, or its preview with --dry-run."""

    recipe: str = output("recipe as given")
    signal: int = output("signal that stopped the run, or 0", default=0)
    preview: str = output("description of the run, with --dry-run only", default="")
    outcome: Mapping[str, Mapping[str, Any]] = output(
        "facts by node, such as run.folder and trainer.step", default=attrs.Factory(dict)
    )

    @property
    def exit_code(self) -> int:
        """128 plus the signal, or 0."""
        return STOPPED + self.signal if self.signal else OK

    def render(self, format: str) -> str:
        """Return the preview. A run prints its progress itself."""
        return self.preview


@output_class
class CheckResult(Result):
    """A recipe's problems."""

    recipe: str = output("recipe as given")
    nodes: int = output("number of nodes")
    problems: Sequence[ProblemData] = output("errors and warnings")

    @classmethod
    def from_problems(cls, recipe: str, nodes: int, problems: Sequence[Problem]) -> "CheckResult":
        """Return a result for problems."""
        return cls(recipe, nodes, [ProblemData(**problem.as_data()) for problem in problems])

    @property
    def exit_code(self) -> int:
        """2 if a problem is not a warning."""
        return OK if all(problem.warning for problem in self.problems) else INVALID

    def render(self, format: str) -> str:
        """Return one line; the problems are on stderr."""
        count = len(self.problems)
        result = f"{count} warning{'s' * (count > 1)}" if count else "no problems"
        return f"{self.recipe}: {self.nodes} nodes, {result}"


@output_class
class ShowResult(Result):
    """The resolved recipe."""

    nodes: Mapping[str, Any] = output("settings and edges by node; an edge is `@name`")
    toml: str = output("resolved recipe with the origin of every value as a comment")

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "ShowResult":
        """Resolve a recipe."""
        return cls(serialize_nodes(recipe.graph.require_valid().nodes), recipe.to_resolved_toml())

    def render(self, format: str) -> str:
        """Return TOML."""
        return self.toml.removesuffix("\n")


@output_class
class NodeData:
    """A node."""

    name: str = output("name in the recipe")
    use: str = output("component")
    edges: Mapping[str, Sequence[str]] = output("target nodes by field")
    reads: Sequence[str] = output("values of a step that the node reads; `?` marks optional ones")
    changes: Sequence[str] = output("values of a step that it changes")
    writes: Sequence[str] = output("values of a step that it writes")


@output_class
class DrawResult(Result):
    """Nodes needed by a run."""

    formats: ClassVar[tuple[str, ...]] = (*FORMATS, JSON)

    nodes: Sequence[NodeData] = output("nodes in the order of building")
    recipe: Recipe = internal()
    focus: str = internal()
    step: bool = internal()

    @classmethod
    def from_recipe(cls, recipe: Recipe, focus: str, step: bool) -> "DrawResult":
        """Return a recipe's nodes; `focus` and `step` apply to pictures."""
        graph = recipe.graph.require_valid()
        return cls(
            [_make_node_data(graph.nodes[name]) for name in graph.topological_order([graph.root])], recipe, focus, step
        )

    def render(self, format: str) -> str:
        """Return a text tree, or a picture as Mermaid, DOT or SVG."""
        kind: Format = next(known for known in FORMATS if known == format)
        return self.recipe.draw(kind, self.focus, step=self.step).removesuffix("\n")


def _make_node_data(node: Any) -> NodeData:
    flow = node.spec.traits.flow
    edges = {key: list(edge.targets) for key, edge in node.edges.items()}
    return NodeData(node.name, node.spec.use, edges, list(flow.reads), list(flow.changes), list(flow.writes))


@output_class
class ExplainResult(Result):
    """Text about a recipe, a node or a value."""

    target: str = output("explained node, setting or edge; empty for the recipe")
    text: str = output("explanation")

    def render(self, format: str) -> str:
        """Return the explanation."""
        return self.text


@output_class
class ChangeData:
    """Difference between two recipes."""

    node: str = output("node; empty for the whole recipe")
    key: str = output("setting or edge; empty for the node itself")
    old: str = output("value of the first recipe, or `absent`")
    new: str = output("value of the second recipe, or `absent`")
    impact: str = output("effect on a resumed run: cosmetic, safe, changes_training or incompatible")
    edge: bool = output("whether the key is an edge")
    why: str = output("reason for the impact, if the component has one")


@output_class
class DiffResult(Result):
    """Differences between two recipes or runs."""

    changes: Sequence[ChangeData] = output("differences by node and key")
    lines: Sequence[str] = internal()

    @classmethod
    def from_changes(cls, changes: Sequence[RecipeChange]) -> "DiffResult":
        """Return a result for changes."""
        return cls([ChangeData(**attrs.asdict(change)) for change in changes], [str(change) for change in changes])

    def render(self, format: str) -> str:
        """Return one line per difference."""
        return "\n".join(self.lines) or "no differences"


@output_class
class SchemaResult(Result):
    """A JSON Schema."""

    schema: Mapping[str, Any] = output("JSON Schema")
    path: Path | None = output("written file, with --output only")

    def render(self, format: str) -> str:
        """Return the schema, unless it was written to a file."""
        return "" if self.path else format_schema(self.schema)


def format_schema(schema: Mapping[str, Any]) -> str:
    """Return a schema as JSON for people: with all letters as they are."""
    return json.dumps(schema, indent=1, ensure_ascii=False, allow_nan=False)


@output_class
class FieldData:
    """A component's setting or edge."""

    name: str = output("key in a recipe")
    kind: str = output("`setting`, or the kind of an edge: one, optional, list, ordered or mapping")
    type: str = output("type of a setting, or port of an edge")
    required: bool = output("whether a recipe must set it")
    default: Any = output("default of a setting; null without one")
    doc: str = output("documentation")

    @classmethod
    def from_field(cls, field: Field) -> "FieldData":
        """Describe a field."""
        is_setting = field.kind == "setting"
        default = convert_to_toml_types(field.default_value()) if is_setting and not field.required else None
        kind = describe_type(field.type) if is_setting else field.target
        return cls(field.name, field.kind, kind, field.required, default, field.doc)


@output_class
class ComponentData:
    """A component."""

    name: str = output("name after `use`")
    doc: str = output("first line of its documentation, or why it can't be imported")
    distribution: str = output("installed package that declares it, or an empty string")
    fields: Sequence[FieldData] = output("settings and edges")

    @classmethod
    def from_spec(cls, name: str, spec: Spec | Problem) -> "ComponentData":
        """Describe a component, or the reason why it has no description."""
        if isinstance(spec, Problem):
            return cls(name, spec.text, "", [])
        fields = [
            FieldData.from_field(field) for field in spec.fields.values() if field.kind == "setting" or field.is_edge
        ]
        return cls(name, spec.summary, spec.distribution or "", fields)


@output_class
class ListResult(Result):
    """Components."""

    components: Sequence[ComponentData] = output("components, by name")
    text: str = internal()

    @classmethod
    def from_component_names(cls, registry: Registry, names: Iterable[str], text: str) -> "ListResult":
        """Describe components."""
        return cls([ComponentData.from_spec(name, registry.find(name)) for name in names], text)

    def render(self, format: str) -> str:
        """Return one line per component, or several for one subject."""
        return self.text


@output_class
class PortData:
    """A port."""

    name: str = output("class name in drawloom.ports")
    doc: str = output("first line of its documentation")
    components: Sequence[str] = output("components implementing it")


@output_class
class PortsResult(Result):
    """Ports, with --ports."""

    ports: Sequence[PortData] = output("ports, by name")
    text: str = internal()

    @classmethod
    def from_listings(cls, ports: Sequence[PortListing]) -> "PortsResult":
        """Describe ports."""
        data = [PortData(port.name, port.doc, port.components) for port in ports]
        return cls(data, "\n\n".join(map(str, ports)))

    def render(self, format: str) -> str:
        """Return the ports with the components implementing them."""
        return self.text
