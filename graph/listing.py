"""Components with their settings, edges and one-line docs, for people to choose from."""

from collections.abc import Iterator

from drawloom.graph.catalogue import Catalogue
from drawloom.graph.problems import Problem, UserError
from drawloom.graph.spec import Field, Spec
from drawloom.graph.suggest import did_you_mean
from drawloom.graph.values import Values
from drawloom.graph.writing import value


def list_components(catalogue: Catalogue, subject: str = "") -> str:
    """All components, one line each; those of a subject with all that can be set."""
    names = [name for name in catalogue.names() if not subject or f"{name}.".startswith(f"{subject}.")]
    if not names:
        known = {name.partition(".")[0] for name in catalogue.names()} | set(catalogue.names())
        raise UserError(f"there is no subject {subject!r}; {did_you_mean(subject, known)}".rstrip("; "), 2)
    found = [spec for spec in map(catalogue.find, names) if not isinstance(spec, Problem)]
    if subject:
        return "\n\n".join("\n".join(_long(spec)) for spec in found)
    width = max(len(spec.use) for spec in found)
    return "\n".join(f"{spec.use:{width}}  {spec.doc}" for spec in found)


def _long(spec: Spec) -> Iterator[str]:
    yield f"{spec.use}: {spec.doc}"
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
    return "" if plain is None else f" = {value(plain)}"


def _doc(field: Field) -> str:
    return f"  ({field.doc})" if field.doc else ""
