"""Texts beside the pointer: the output of `explain` and `list`."""

import inspect
from collections.abc import Iterator

from drawloom.graph.inspect.explain import explain, format_variable_history
from drawloom.graph.inspect.listing import format_components, format_field
from drawloom.graph.lsp.workspace import Meaning, Workspace
from drawloom.graph.problems import Problem
from drawloom.graph.wiring.node import format_path


def describe_token(workspace: Workspace, meaning: Meaning) -> str:
    """Return the text for a key or value, or an empty string."""
    if meaning.use:
        return describe_component(workspace, meaning.use)
    if meaning.reference_target:
        return "\n\n".join(_describe_reference(workspace, meaning))
    if meaning.variable:
        return format_variable_history(meaning.graph, meaning.variable)
    if not meaning.node or meaning.spec is None:
        return ""
    if not meaning.path:
        return _describe_node(workspace, meaning, meaning.node)
    if meaning.path[0] == "use":
        return describe_component(workspace, meaning.spec.use)
    if meaning.field is None:
        return ""
    if meaning.node not in meaning.graph.nodes:
        return f"[{meaning.node}] {format_field(meaning.field)}"
    return explain(meaning.graph, f"{meaning.node}.{format_path(meaning.path)}", workspace.project.root)


def describe_component(workspace: Workspace, use: str) -> str:
    """Return a component's docstring, settings and edges, or the problem if it does not exist."""
    spec = workspace.project.registry.find(use)
    if isinstance(spec, Problem):
        return f"{spec.text}; {spec.hint}".rstrip("; ")
    rest = inspect.cleandoc(spec.cls.__doc__ or "").partition("\n")[2].strip()
    return "\n\n".join(filter(None, (format_components(workspace.project.registry, use), rest)))


def _describe_node(workspace: Workspace, meaning: Meaning, name: str) -> str:
    graph, root = meaning.graph, workspace.project.root
    if name in graph.nodes and root in graph.nodes:
        return explain(graph, name, root)
    spec = graph.nodes[name].spec if name in graph.nodes else meaning.spec
    return f"[{name}] {describe_component(workspace, spec.use)}" if spec else ""


def _describe_reference(workspace: Workspace, meaning: Meaning) -> Iterator[str]:
    """Yield an edge's port, and its target node or group of nodes."""
    if meaning.field:
        yield f"[{meaning.node}] {format_field(meaning.field)}"
    graph, name = meaning.graph, meaning.reference_target
    if name in graph.nodes:
        yield _describe_node(workspace, meaning, name)
    elif name in graph.recipe.groups:
        members = [graph.nodes[member] for member in graph.recipe.groups[name] if member in graph.nodes]
        yield "\n".join(f"[{node.name}] {node.spec.use}: {node.spec.summary}" for node in members)
