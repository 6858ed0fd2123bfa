"""Components with their settings, edges and one-line docs, for people to choose from."""

from collections.abc import Iterator

from drawloom.graph.problems import Problem, UserError
from drawloom.graph.registry.registry import Registry
from drawloom.graph.registry.sources import distribution
from drawloom.graph.registry.spec import Field, Spec
from drawloom.graph.toml.emit import dumps
from drawloom.graph.toml.suggest import did_you_mean
from drawloom.graph.types.structure import Values


def list_components(catalogue: Registry, subject: str = "") -> str:
    """All components, one line each; those of a subject with all that can be set."""
    names = [name for name in catalogue.names() if not subject or f"{name}.".startswith(f"{subject}.")]
    if not names:
        known = {name.partition(".")[0] for name in catalogue.names()} | set(catalogue.names())
        raise UserError(f"there is no subject {subject!r}; {did_you_mean(subject, known)}".rstrip("; "), 2)
    if subject:
        return "\n\n".join("\n".join(_long(name, catalogue.find(name))) for name in names)
    width = max(map(len, names))
    return "\n".join(f"{name:{width}}  {_short(catalogue.find(name))}" for name in names)


def list_plugins(catalogue: Registry) -> str:
    """What installed distributions bring, one component a line, with who brings it; those that clash say so."""
    entries = catalogue.installed.entries
    if not entries:
        return f"no installed package declares components in the group {catalogue.installed.group!r}"
    clashing = [name for name in catalogue.installed.names() if len(catalogue.candidates(name)) > 1]
    rows = [(e.name, distribution(e), f"{e.value}{' (clashes)' if e.name in clashing else ''}") for e in entries]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {who:{widths[1]}}  {value}" for name, who, value in sorted(rows))


def _short(found: Spec | Problem) -> str:
    return found.text if isinstance(found, Problem) else found.doc


def _long(name: str, found: Spec | Problem) -> Iterator[str]:
    from_package = f" ({found.distribution})" if isinstance(found, Spec) and found.distribution else ""
    yield f"{name}: {_short(found)}{from_package}"
    if isinstance(found, Spec):
        yield from _fields(found)


def _fields(spec: Spec) -> Iterator[str]:
    for field in spec.fields.values():
        if field.kind == "setting":
            yield f"  {field.name}: {Values().describe_type(field.type)}{_default(field)}{_doc(field)}"
        elif field.is_edge:
            yield f"  {field.name} -> {ports(field)}"


def ports(field: Field) -> str:
    """What an edge leads to, in words."""
    port = " or ".join(port.__name__ for port in field.ports)
    many = {"optional": f"{port}, or none", "list": f"any number of {port}", "mapping": f"named {port}"}
    many["ordered"] = f"a sequence of {port}"
    return many.get(field.kind, port)


def _default(field: Field) -> str:
    if field.required:
        return ", required"
    plain = Values().unstructure(field.default_value())
    return "" if plain is None else f" = {dumps(plain)}"


def _doc(field: Field) -> str:
    return f"  ({field.doc})" if field.doc else ""
