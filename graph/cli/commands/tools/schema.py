"""print the JSON Schema of recipes, or of a command's JSON"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drawloom.graph.cli.command import Command, Project, Result, UserError, command, option, output, output_class
from drawloom.graph.cli.schemas import read_result_schema
from drawloom.graph.schema import make_recipe_schema


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


@command
class SchemaCommand(Command):
    """A JSON Schema, printed or written to a file."""

    result: str = option(
        "print the schema of this command's --format json, not of recipes", default="", metavar="COMMAND"
    )
    output: Path | None = option("write the schema to this file (default: stdout)", metavar="FILE")

    def run(self, project: Project) -> SchemaResult:
        schema = read_result_schema(project, self.result) if self.result else None
        schema = schema or make_recipe_schema(project.registry, project.shipped_components_by_node())
        if self.output is not None:
            try:
                self.output.write_text(f"{format_schema(schema)}\n", "utf-8")
            except OSError as error:
                raise UserError(
                    f"--output {self.output}: {error.strerror}; name a file in a writable folder"
                ) from error
        return SchemaResult(schema, self.output)
