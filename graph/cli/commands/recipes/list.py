"""list components with their settings"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from drawloom.graph.cli.command import (
    Command,
    Problem,
    Project,
    Result,
    TextResult,
    argument,
    command,
    option,
    output,
    output_class,
)
from drawloom.graph.inspect.listing import (
    find_component_names,
    find_fitting_components,
    format_components,
    format_fitting_components,
    format_plugins,
    list_ports,
)
from drawloom.graph.inspect.serialize import convert_to_toml_types
from drawloom.graph.recipe.loading import RecipeFolder
from drawloom.graph.registry.registry import Field, Spec
from drawloom.graph.types.describe import describe_type


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
class ListResult(TextResult):
    """Components."""

    components: Sequence[ComponentData] = output("components, by name")


@output_class
class PortData:
    """A port."""

    name: str = output("class name in drawloom.ports")
    doc: str = output("first line of its documentation")
    components: Sequence[str] = output("components implementing it")


@output_class
class PortsResult(TextResult):
    """Ports, with --ports."""

    ports: Sequence[PortData] = output("ports, by name")


@output_class
class RecipeData:
    """A shipped recipe."""

    name: str = output("name for `run` and `extends`")
    topic: str = output("folder of recipes")
    doc: str = output("first line of its comment")


@output_class
class RecipesResult(Result):
    """Shipped recipes, with --recipes."""

    recipes: Sequence[RecipeData] = output("recipes, by topic and name")

    @classmethod
    def from_folder(cls, folder: RecipeFolder) -> "RecipesResult":
        """Describe all recipes in the folder."""
        lines = {name: path.read_text("utf-8").partition("\n")[0] for name, path in folder.paths.items()}
        data = [RecipeData(name, folder.paths[name].parent.name, line.strip("# :")) for name, line in lines.items()]
        return cls(sorted(data, key=lambda recipe: recipe.topic))

    def render(self, format: str) -> str:
        """Return a line per recipe, below its topic."""
        width = max(len(recipe.name) for recipe in self.recipes)
        lines = []
        for topic, recipes in groupby(self.recipes, key=lambda recipe: recipe.topic):
            lines += [topic, *(f"  {recipe.name:<{width}}  {recipe.doc}" for recipe in recipes)]
        return "\n".join(lines)


@command
class ListCommand(Command):
    """A listing for components, ports or recipes."""

    subject: str = argument(
        "folder of components or one component, such as data or data.loader (default: all)", default=""
    )
    fits: str = option(
        "list the components for this node of the shipped recipes, or for this port", default="", metavar="NODE|PORT"
    )
    ports: bool = option("list all ports with their components")
    plugins: bool = option("list components of installed packages with their distributions")
    recipes: bool = option("list the shipped recipes by topic, with the first line of their comments")

    def run(self, project: Project) -> ListResult | PortsResult | RecipesResult:
        registry = project.registry
        names: Iterable[str]
        if self.recipes:
            return RecipesResult.from_folder(RecipeFolder(project.recipes))
        if self.ports:
            ports = list_ports(registry)
            data = [PortData(port.name, port.doc, port.components) for port in ports]
            return PortsResult("\n\n".join(map(str, ports)), data)
        if self.plugins:
            names, text = registry.installed.names(), format_plugins(registry)
        elif self.fits:
            names = fitting = find_fitting_components(registry, list(project.shipped_graphs()), self.fits)
            text = format_fitting_components(fitting, self.fits)
        else:
            names = find_component_names(registry, self.subject)
            text = format_components(registry, self.subject)
        return ListResult(text, [ComponentData.from_spec(name, registry.find(name)) for name in names])
