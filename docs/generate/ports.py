"""Pages of the ports, made of their Protocols: each member, what it takes and gives, and who uses it."""

import ast
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from drawloom.graph.registry.registry import Spec
from drawloom.graph.types.port_match import implements
from generate.catalogue import anchor, component_link, specs
from generate.source import PORTS, STATE, Module, modules, summary
from generate.uses import Use, uses

INDEX = """\
# The ports

A port is an interface between components: a Protocol in `components/ports/`, imported from `drawloom.ports`. A field of
a component whose type is a port is an edge to another node, and a component implements a port by having its members;
no class is inherited. `drawloom list --ports` lists all ports with their components, `drawloom list --fits PORT` the
components of one port, and `drawloom.testing.check_port` checks a component against the contract of a port.

These pages are generated from the Protocols. Below each member are the functions that use it:
`run_phase` is called in every step, `open` before the first, `on_event` for every [event](../step.md#events). Shipped
components are found by the same comparison of members as in a recipe.
"""


def port_pages() -> Iterator[tuple[str, str]]:
    """A page for each module of ports, and an index of them."""
    listed = [INDEX]
    for module in _modules():
        name = Path(module.file).stem
        title = summary(module.tree)
        listed += ["", f"## [{title.rstrip('.')}]({name}.md)", "", "| | |", "|---|---|"]
        listed += [
            f"| [`{cls}`]({name}.md#{anchor(cls)}) | {summary(node) or ''} |" for cls, node in module.classes.items()
        ]
        yield f"ports/{name}.md", "\n".join([f"# {name.capitalize()}", "", title, *_module(module), ""])
    yield "ports/index.md", "\n".join([*listed, ""])


def _modules() -> list[Module]:
    ports = [module for file, module in modules().items() if file.startswith(PORTS) and "__init__" not in file]
    return [*ports, *(modules()[file] for file in STATE)]


def is_port(node: ast.ClassDef) -> bool:
    """Whether fields of this class are edges."""
    return any(ast.unparse(mark).partition("(")[0] == "port" for mark in node.decorator_list)


def _module(module: Module) -> Iterator[str]:
    follows: list[ast.stmt | None] = [*module.tree.body[1:], None]
    for node, after in zip(module.tree.body, follows, strict=True):
        match node, after:
            case ast.ClassDef(), _:
                yield from _class(node)
            case ast.FunctionDef(), _:
                yield from ["", f"## {node.name}", "", *_code(_signature(node)), "", *_doc(node)]
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target), _:
                yield from ["", f"## {ast.unparse(target)}", "", *_code(ast.unparse(node))]
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    yield from ["", textwrap.dedent(str(after.value.value)).strip()]


def _class(node: ast.ClassDef) -> Iterator[str]:
    yield from ["", f"## {node.name}", ""]
    if is_port(node):
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id != "Protocol"]
        yield f"*A port{f', with all of `{bases[0]}`' if bases else ''}.*"
        yield ""
    yield from _doc(node)
    if is_port(node):
        yield from _components(node.name)
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and ast.unparse(each.target)[0] != "_"]
    if fields:
        yield from ["", *_code("\n".join(map(ast.unparse, fields)))]
    for function in node.body:
        if isinstance(function, ast.FunctionDef) and _is_public(function):
            yield from _member(node, function)


def _is_public(function: ast.FunctionDef) -> bool:
    setter = any(ast.unparse(mark).endswith(".setter") for mark in function.decorator_list)
    return not setter and (function.name[0] != "_" or function.name.startswith("__"))


def _member(owner: ast.ClassDef, function: ast.FunctionDef) -> Iterator[str]:
    yield from ["", f"### {owner.name}.{function.name}", "", *_code(_signature(function)), "", *_doc(function), ""]
    found = uses().get((owner.name, function.name), [])
    yield from ["Used by:", ""] if found else []
    yield from map(_use, found[:8])
    if len(found) > 8:
        yield f"- and in {len(found) - 8} more functions"


def _use(use: Use) -> str:
    name = use.file.removeprefix("components/").removesuffix(".py").replace("/", ".")
    return f"- `{name}`, in `{use.function}`: {use.does[:1].lower()}{use.does[1:]}".rstrip(": ")


def _components(port: str) -> Iterator[str]:
    """Who takes a port, and the shipped components that implement it."""
    takes = [
        f"{component_link(spec, '../')} (`{field.name}`)"
        for spec in specs()
        for field in [*spec.fields.values(), *spec.fields_of_kind_every]
        if port in [each.__name__ for each in field.ports]
    ]
    gives = [component_link(spec, "../") for spec in implementers(port)]
    yield from ["", f"Taken by: {', '.join(dict.fromkeys(takes)) or 'no shipped component'}."]
    yield from ["", f"Implemented by: {', '.join(gives) or 'no shipped component'}."]


@cache
def implementers(port: str) -> list[Spec]:
    """The shipped components that fit a port, by its name."""
    from drawloom import ports

    return [spec for spec in specs() if implements(spec.cls, getattr(ports, port))]


def _signature(function: ast.FunctionDef) -> str:
    """As it is written, without its body; a property as an attribute."""
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    if any(ast.unparse(mark) == "property" for mark in function.decorator_list):
        return f"{function.name}: {ast.unparse(function.returns)}" if function.returns else function.name
    arguments = ast.unparse(function.args).removeprefix("self").removeprefix(", ")
    line = f"{function.name}({arguments}){returns}"
    if len(line) <= 100:
        return line
    each = "".join(f"    {part},\n" for part in _parts(arguments))
    return f"{function.name}(\n{each}){returns}"


def _parts(arguments: str) -> list[str]:
    """Arguments, split at the commas that are not inside of brackets."""
    found, depth = [""], 0
    for letter in arguments:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found]


def _code(text: str) -> list[str]:
    return ["```python", text, "```"]


def _doc(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    return (ast.get_docstring(node) or "").splitlines()
