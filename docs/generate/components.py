"""Pages of the components, by subject: their settings with types, defaults and units, and their edges."""

import inspect
from collections.abc import Iterator, Mapping
from itertools import groupby

from drawloom.graph.component import Bound
from drawloom.graph.inspect.serialize import convert_to_toml_types
from drawloom.graph.registry.registry import Field, Spec
from drawloom.graph.toml.emit import dump_toml
from drawloom.graph.types.describe import describe_type
from drawloom.graph.types.port_match import implements
from generate.catalogue import anchor, specs, subject
from generate.source import modules, summary

IMPACTS = {"safe": "safe", "changes_training": "changes training", "incompatible": "incompatible"}
INDEX = """\
# Components

All components that `use` can name. A setting without a default is required. The last column says what happens if a run
is resumed with another value: *safe*, training computes the same; *changes training*, the resume needs
`--accept-changes`; *incompatible*, the saved state does not fit. `drawloom list NAME` prints the same in a terminal.

| | |
|---|---|
"""


def component_pages() -> Iterator[tuple[str, str]]:
    """A page for each subject, and an index of all components."""
    listed = []
    for name, found in groupby(specs(), key=lambda spec: subject(spec.use)):
        of_subject = list(found)
        listed += [f"| [`{spec.use}`]({name}.md#{anchor(spec.use)}) | {cell(spec.summary)} |" for spec in of_subject]
        about = summary(modules()[f"components/{name}/__init__.py"].tree)
        body = "\n".join(line for spec in of_subject for line in _component(spec))
        yield f"reference/components/{name}.md", f"# {name}\n\n{about}\n\n{body}\n"
    yield "reference/components/index.md", INDEX + "\n".join([*listed, *_exclusions()]) + "\n"


def _exclusions() -> Iterator[str]:
    """A table of the features that can't be beside another component, and why; all others work together."""
    yield from ["", "## Components that exclude one another", ""]
    yield from ["| component | not beside | because |", "|---|---|---|"]
    for spec in specs():
        excludes: Mapping[str, str] = getattr(spec.cls, "excludes", {})
        yield from (f"| `{spec.use}` | `{other}` | {cell(reason)} |" for other, reason in excludes.items())


def _component(spec: Spec) -> Iterator[str]:
    yield from [f"## {spec.use}", "", *inspect.cleandoc(spec.cls.__doc__ or "").splitlines(), ""]
    for module, package in spec.traits.needs.items():
        yield from [f"Needs `{module}`: `pip install '{package}'`.", ""]
    flow = spec.traits.flow
    for verb, names in (("Reads", flow.reads), ("Writes", flow.writes), ("Changes", flow.changes)):
        if names:
            links = [f"[`{name}`](../../step.md#values)" for name in names]
            yield from [f"{verb} {', '.join(links)}.", ""]
    ports = [f"[`{name}`](../../ports/{file}.md#{anchor(name)})" for name, file in _ports() if _fits(spec, name)]
    if ports:
        yield from [f"Fits where one of these is taken: {', '.join(ports)}.", ""]
    settings = [field for field in spec.fields.values() if field.kind == "setting"]
    if settings:
        yield from [
            "| setting | type | default | what it is | a resume with another |",
            "|---|---|---|---|---|",
        ]
        yield from [*map(setting_row, settings), ""]
    edges = [
        field
        for field in [*spec.fields.values(), *spec.fields_of_kind_every]
        if field.kind not in ("setting", "recipe")
    ]
    if edges:
        yield from ["| edge | leads to |", "|---|---|", *map(_edge_row, edges), ""]
    source = inspect.getsourcefile(spec.cls) or ""
    yield from [f"Source: `{source[source.rindex('components/') :]}`.", ""]


def setting_row(field: Field) -> str:
    """A setting as a row: name, type, default, what it is, and its impact on a resume."""
    bound = _bound(field)
    kind = describe_type(field.type) + (f", {bound}" if bound else "")
    cells = [f"`{field.name}`", cell(kind), default_of(field), cell(field.doc), IMPACTS[field.impact]]
    return f"| {' | '.join(cells)} |"


def default_of(field: Field) -> str:
    """A default as TOML; a word for none."""
    if field.required:
        return "*required*"
    plain = convert_to_toml_types(field.default_value())
    return "*none*" if plain is None else f"`{cell(dump_toml(plain))}`"


def cell(text: str) -> str:
    """Text as the cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def _bound(field: Field) -> str:
    bound = field.check
    if not isinstance(bound, Bound):
        return ""
    if bound.below is not None:
        return f"from {bound.at_least:g} to below {bound.below:g}"
    return f"at least {bound.at_least:g}" if bound.at_least is not None else f"above {bound.above:g}"


def _edge_row(field: Field) -> str:
    target = f"every {' or '.join(port.__name__ for port in field.ports)} of the graph, by itself"
    text = target if field.kind == "every" else field.target
    for name, file in _ports():
        if name in [port.__name__ for port in field.ports]:
            text = text.replace(name, f"[`{name}`](../../ports/{file}.md#{anchor(name)})", 1)
    return f"| `{field.name}`{'' if field.required or field.kind == 'every' else ', optional'} | {text} |"


def _ports() -> list[tuple[str, str]]:
    from generate.ports import is_port

    found = [(name, module, node) for module in modules().values() for name, node in module.classes.items()]
    return [(name, module.file[len("components/ports/") : -3]) for name, module, node in found if is_port(node)]


def _fits(spec: Spec, port: str) -> bool:
    from drawloom import ports

    return implements(spec.cls, getattr(ports, port))


def settings_page() -> str:
    """The settings of the nodes that recipes have, by node: what `first_run` sets, the default, what it is."""
    from drawloom import Recipe

    graph = Recipe.load("first_run").graph
    lines = [SETTINGS]
    for node in graph.nodes.values():
        fields = [field for field in node.spec.fields.values() if field.kind == "setting"]
        if fields and not node.owner:
            link = f"components/{subject(node.spec.use)}.md#{anchor(node.spec.use)}"
            lines += ["", f"## [{node.name}]", "", f"[`{node.spec.use}`]({link}): {node.spec.summary}", ""]
            lines += ["| setting | in first_run | default | what it is |", "|---|---|---|---|"]
            lines += [
                f"| `{node.name}.{field.name}` | {_written(node.settings[field.name])} | {default_of(field)} "
                f"| {cell(field.doc)} |"
                for field in fields
            ]
    return "\n".join([*lines, ""])


SETTINGS = """\
# Settings

Every setting of the recipe `first_run`, by node: its value there, its default, and what it is, with its unit. Change
one in a recipe, or with `node.key=value` on the command line. Other components have other settings: see
[Components](components/index.md).
"""


def _written(value: object) -> str:
    plain = convert_to_toml_types(value)
    return "" if plain is None else f"`{cell(dump_toml(plain))}`"
