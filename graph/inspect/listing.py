"""`drawloom list`: components with their settings, edges and first lines of documentation."""

from collections.abc import Iterator

from drawloom.graph.inspect.serialize import serialize_value
from drawloom.graph.problems import Problem, UserError, did_you_mean
from drawloom.graph.registry.registry import Registry, distribution
from drawloom.graph.registry.spec import Field, Spec
from drawloom.graph.toml.emit import dumps
from drawloom.graph.types.describe import describe_type


def list_components(registry: Registry, subject: str = "") -> str:
    """All components in one line each, or those of a subject with their settings and edges."""
    names = [name for name in registry.names() if not subject or f"{name}.".startswith(f"{subject}.")]
    if not names:
        known = {name.partition(".")[0] for name in registry.names()} | set(registry.names())
        raise UserError(f"there is no subject {subject!r}; {did_you_mean(subject, known)}".rstrip("; "), 2)
    if subject:
        return "\n\n".join("\n".join(_long(name, registry.find(name))) for name in names)
    width = max(map(len, names))
    return "\n".join(f"{name:{width}}  {_short(registry.find(name))}" for name in names)


def list_plugins(registry: Registry) -> str:
    """The components of installed distributions, one a line; names that two distributions use are marked."""
    entries = registry.installed.entries
    if not entries:
        return f"no installed package declares components in the group {registry.installed.group!r}"
    clashing = [name for name in registry.installed.names() if len(registry.candidates(name)) > 1]
    # Sorted by name below, so that clashing entries are neighbours.
    rows = [(e.name, distribution(e), f"{e.value}{' (clashes)' if e.name in clashing else ''}") for e in entries]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {source:{widths[1]}}  {value}" for name, source, value in sorted(rows))


def _short(found: Spec | Problem) -> str:
    return found.text if isinstance(found, Problem) else found.doc


def _long(name: str, found: Spec | Problem) -> Iterator[str]:
    origin = f" ({found.distribution})" if isinstance(found, Spec) and found.distribution else ""
    yield f"{name}: {_short(found)}{origin}"
    if isinstance(found, Spec):
        yield from _fields(found)


def _fields(spec: Spec) -> Iterator[str]:
    for field in spec.fields.values():
        if field.kind == "setting":
            yield f"  {field.name}: {describe_type(field.type)}{_default(field)}{_doc(field)}"
        elif field.is_edge:
            yield f"  {field.name} -> {field.target}"


def _default(field: Field) -> str:
    if field.required:
        return ", required"
    plain = serialize_value(field.default_value())
    return "" if plain is None else f" = {dumps(plain)}"


def _doc(field: Field) -> str:
    return f"  ({field.doc})" if field.doc else ""
