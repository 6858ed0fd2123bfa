"""write a recipe that extends another, with every value that may be changed as a comment"""

import os
from collections.abc import Iterator
from pathlib import Path

from drawloom.components.commands._options import check_new_file
from drawloom.components.storage.durable_files import replace_file
from drawloom.graph.cli.command import (
    Command,
    Project,
    Recipe,
    Result,
    UserError,
    argument,
    command,
    option,
    output,
    output_class,
)
from drawloom.graph.inspect.serialize import convert_to_toml_types
from drawloom.graph.recipe.layers import Leaf
from drawloom.graph.toml.emit import dump_key, dump_toml
from drawloom.graph.wiring.graph import Graph
from drawloom.graph.wiring.node import Node

CHOSEN = ("corpus", "tokenizer", "loss", "schedule")  # nodes whose component users often replace

HEAD = """\
# {path} is {base}, but for what is written here.
#
# To change a value, remove the "# " before it and before the [table] above it. Then:
#   drawloom check {path}: all problems at once
#   drawloom run {path} --dry-run: what would be trained, and on what
#   drawloom run {path}: train, in runs/{name}
#   drawloom list --fits NODE: what else may be written after `use`
#   drawloom list COMPONENT: all settings of a component

extends = {extends}

[run]
name = {quoted}
"""


@output_class
class NewResult(Result):
    """A written recipe."""

    path: Path = output("written recipe")
    extends: str = output("recipe that it extends")

    def render(self, format: str) -> str:
        """Return one line on how to run the recipe."""
        return f"{self.path} extends {self.extends}; `drawloom run {self.path}` trains it"


@command
class NewCommand(Command):
    """A new recipe, written to a file."""

    name: str = argument("name of the run; NAME.toml is written, and must not exist")
    base: str = option(
        "extend this recipe: a path, or a shipped name", default="first_run", name="--from", metavar="RECIPE"
    )

    def run(self, project: Project) -> NewResult:
        path = Path(f"{self.name.removesuffix('.toml')}.toml")
        recipe = Recipe.load(self.base, project=project)
        # The check also refuses invalid names of runs.
        recipe.with_values({"run": {"name": path.stem}}).check(skip_machine_checks=True)
        extends = os.path.relpath(self.base, path.parent) if self.base.endswith(".toml") else self.base
        head = HEAD.format(
            path=path, base=self.base, name=path.stem, extends=dump_toml(extends), quoted=dump_toml(path.stem)
        )
        if reason := check_new_file(path):
            raise UserError(reason, 2)
        try:
            replace_file(path, "\n".join([head, *_format_nodes_as_comments(recipe.graph)]).encode())
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}; free space or write another folder, and repeat the command"
            ) from error
        return NewResult(path, self.base)


def _format_nodes_as_comments(graph: Graph) -> Iterator[str]:
    """Yield the variables, and every node with the settings that the recipe or its bases set, as comments."""
    if graph.recipe.vars:
        yield "# [vars]"
        yield from (f"# {dump_key(key)} = {dump_toml(leaf.value)}" for key, leaf in graph.recipe.vars.items())
        yield ""
    # The recipe's own tables come first, then the tables of its bases.
    for node in sorted(graph.nodes.values(), key=lambda node: -graph.recipe.layers.index(node.table.layer)):
        lines = [] if node.owner or node.name == "run" else list(_comment_out_written_settings(node))
        if lines or node.name in CHOSEN:
            yield f"# [{'.'.join(map(dump_key, node.name.split('.')))}]"
            yield from [f"# use = {dump_toml(node.spec.use)}", *lines, ""]


def _comment_out_written_settings(node: Node) -> Iterator[str]:
    """Yield a node's written settings as comments with their docs, without references to other nodes."""
    for key, item in node.table.items.items():
        field = node.spec.fields.get(key)
        if field is not None and field.kind == "setting":
            value = item.value if isinstance(item, Leaf) else convert_to_toml_types(node.settings[key])
            doc = f"  # {field.doc}" if field.doc else ""
            yield f"# {dump_key(key)} = {dump_toml(value)}{doc}"
