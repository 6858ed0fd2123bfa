"""Page of the JSON that commands print."""

from collections.abc import Iterator
from typing import Any

from drawloom.graph.cli.main import find_command_files
from drawloom.graph.cli.schemas import read_result_schema
from drawloom.graph.problems import UserError
from generate.catalogue import project

HEAD = """\
# JSON of commands

Every command with `--format json` prints one JSON text on standard output, and all else on standard error. `drawloom
schema --result COMMAND` prints the JSON Schema, which has no other keys than this page. Keys are never null unless the
table says so; `number` may be null for a number that is not finite. A field is only added or removed with a line in the
[changelog](../changelog.md).

| exit code | |
|---|---|
| 0 | the command has done what it should |
| 1 | it failed, or its verdict is negative: a damaged file, a plan that does not fit, runs that differ |
| 2 | the command line or a recipe is wrong |
| 128 + n | signal n stopped it |

A command that fails prints an object with the key `error` instead:

"""


def results_page() -> str:
    """Return the fields of every command's result."""
    failure = read_result_schema(project(), "check")["anyOf"][-1]["properties"]["error"]
    lines = [HEAD, *_tables(failure, "error")]
    for command in find_command_files(project()):
        lines += [f"## {command}", ""]
        try:
            schemas = read_result_schema(project(), command)["anyOf"][:-1]
        except UserError:  # a server
            lines += ["A server, whose output is a protocol.", ""]
            continue
        for schema in schemas:
            lines += [schema["description"], "", *_tables(schema, "")]
    return "\n".join(lines)


def _tables(schema: dict[str, Any], path: str) -> Iterator[str]:
    """Yield a table of an object's fields, and tables of the objects in it."""
    yield from [f"| {f'`{path}`: ' if path else ''}field | type | |", "|---|---|---|"]
    inner: list[tuple[str, dict[str, Any]]] = []
    for name, field in schema["properties"].items():
        kind, objects = _describe(field)
        inner += [(f"{path}.{name}" if path else name, item) for item in objects]
        yield f"| `{name}` | {kind} | {field.get('description', '').replace('|', chr(92) + '|')} |"
    yield ""
    for name, item in inner:
        yield from _tables(item, name)


def _describe(schema: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return the words for a type, and the objects with fields in it."""
    if "properties" in schema:
        return "object", [schema]
    if "anyOf" in schema:
        parts = [_describe(part) for part in schema["anyOf"]]
        return " or ".join(kind for kind, _ in parts), [item for _, objects in parts for item in objects]
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"]), []
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return f"({', '.join(_describe(part)[0] for part in schema['prefixItems'])})", []
        case "array":
            kind, objects = _describe(schema["items"])
            return f"list: {kind}", objects
        case "object":
            kind, objects = _describe(schema["additionalProperties"])
            return f"object by name: {kind}", objects
        case ["number", "null"]:
            return "number", []
        case None:
            return "any", []
        case kind:
            return str(kind), []
