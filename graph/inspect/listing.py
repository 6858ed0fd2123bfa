"""`drawloom list`: components with settings, edges and documentation, also filtered by port or node."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from drawloom.graph.inspect.serialize import convert_to_toml_types
from drawloom.graph.problems import Problem, UserError, did_you_mean
from drawloom.graph.registry.registry import Field, Registry, Spec, describe_distribution
from drawloom.graph.types.describe import describe_type, dump_toml_or_repr
from drawloom.graph.types.port_match import implements, implements_any
from drawloom.graph.wiring.graph import Graph
from drawloom.graph.wiring.node import Node


def find_component_names(registry: Registry, subject: str = "") -> list[str]:
    """Return the names of all components, or of a subject's. Raises UserError if there are none."""
    names = [name for name in registry.names() if not subject or f"{name}.".startswith(f"{subject}.")]
    if not names:
        known = {name.partition(".")[0] for name in registry.names()} | set(registry.names())
        raise UserError(f"there is no subject {subject!r}; {did_you_mean(subject, known)}".rstrip("; "), 2)
    return names


def format_components(registry: Registry, subject: str = "") -> str:
    """List all components, one per line, or a subject's components with settings and edges."""
    names = find_component_names(registry, subject)
    if subject:
        return "\n\n".join("\n".join(_format_component(name, registry.find(name))) for name in names)
    width = max(map(len, names))
    return "\n".join(f"{name:{width}}  {_format_summary(registry.find(name))}" for name in names)


def find_fitting_components(registry: Registry, graphs: Iterable[Graph], name: str) -> dict[str, Spec]:
    """
    Return the components implementing the port `name`, or fitting the node `name` in these graphs.

    The incoming edges of a node determine which components fit. In a sequence such as phases, a component must also
    write and change the same values. A group stands for its members.
    """
    specs, ports = registry.specs(), {}
    if not (required_roles := [role for graph in graphs for role in find_replacement_conditions(graph, name)]):
        ports = collect_field_ports(specs)
        if name not in ports:
            known = {part for graph in graphs for node in graph.nodes for part in (node, node.partition(".")[0])}
            hint = did_you_mean(name, known | ports.keys())
            raise UserError(f"no shipped recipe has a node [{name}], and there is no such port; {hint}".rstrip("; "), 2)
        required_roles = [lambda spec: implements(spec.cls, ports[name])]
    return {spec.use: spec for spec in specs if all(role(spec) for role in required_roles)}


def format_fitting_components(fitting: Mapping[str, Spec], name: str) -> str:
    """List components fitting a node or implementing a port, one per line."""
    width = max(map(len, fitting), default=0)
    rows = [f"{use:{width}}  {spec.summary}".rstrip() for use, spec in fitting.items()]
    return "\n".join(rows) or f"no component implements {name}"


@attrs.frozen
class PortListing:
    """A port used by component fields: its documentation, and the components implementing it."""

    name: str
    doc: str
    components: Sequence[str]

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {self.doc}".rstrip(": "), *(f"  {use}" for use in self.components)])


def list_ports(registry: Registry) -> list[PortListing]:
    """Return the ports used by component fields."""
    specs = registry.specs()
    return [
        PortListing(
            name,
            (port.__doc__ or "").strip().partition("\n")[0],
            [spec.use for spec in specs if implements(spec.cls, port)],
        )
        for name, port in collect_field_ports(specs).items()
    ]


def collect_field_ports(specs: Iterable[Spec]) -> dict[str, type]:
    """Return the ports of all fields in these components by name, sorted."""
    ports = {port.__name__: port for spec in specs for field in spec.fields.values() for port in field.ports}
    return dict(sorted(ports.items()))


def find_replacement_conditions(graph: Graph, name: str) -> Iterator[Callable[[Spec], bool]]:
    """
    Yield a predicate for every edge to the node or group `name`: whether a component could be its target.
    """
    for node in graph.nodes.values():
        if node.name == name or node.name.startswith(f"{name}."):
            for user, keys in graph.list_users_with_edge_names(node.name):
                yield from (_make_replacement_condition(node, graph.nodes[user].spec.fields[key]) for key in keys)


def _make_replacement_condition(node: Node, field: Field) -> Callable[[Spec], bool]:
    """Return a predicate: whether a component fits the edge, and in a sequence writes and changes the same values."""
    flow = node.spec.traits.flow
    produced = {*flow.writes, *flow.changes}

    def fits(spec: Spec) -> bool:
        produces_same = field.kind != "ordered" or {*spec.traits.flow.writes, *spec.traits.flow.changes} == produced
        return produces_same and implements_any(spec.cls, field.ports)

    return fits


def format_plugins(registry: Registry) -> str:
    """List the components from installed distributions, one per line. Names used by two distributions are marked."""
    entries = registry.installed.entries
    if not entries:
        return f"no installed package declares components in the group {registry.installed.group!r}"
    clashing = [name for name in registry.installed.names() if len(registry.find_candidates(name)) > 1]
    # Sorted by name below, so that clashing entries are adjacent.
    rows = [
        (e.name, describe_distribution(e), f"{e.value}{' (clashes)' if e.name in clashing else ''}") for e in entries
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {source:{widths[1]}}  {value}" for name, source, value in sorted(rows))


def _format_summary(spec: Spec | Problem) -> str:
    return spec.text if isinstance(spec, Problem) else spec.summary


def _format_component(name: str, spec: Spec | Problem) -> Iterator[str]:
    origin = f" ({spec.distribution})" if isinstance(spec, Spec) and spec.distribution else ""
    yield f"{name}: {_format_summary(spec)}{origin}"
    if isinstance(spec, Spec):
        yield from (f"  {line}" for field in spec.fields.values() if (line := format_field(field)))


def format_field(field: Field) -> str:
    """Format a setting with type, default and documentation, or an edge with its port. Empty for other fields."""
    doc = f"  ({field.doc})" if field.doc else ""
    if field.kind == "setting":
        return f"{field.name}: {describe_type(field.type)}{_format_default(field)}{doc}"
    return f"{field.name} -> {field.target}" if field.is_edge else ""


def _format_default(field: Field) -> str:
    if field.required:
        return ", required"
    plain = convert_to_toml_types(field.default_value())
    return "" if plain is None else f" = {dump_toml_or_repr(plain)}"
