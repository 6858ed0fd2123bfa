"""Load the layers of a recipe by name: the file, its bases, and the overlays."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from glob import escape, glob
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from drawloom.graph.problems import COMMAND_LINE, Position, Problem, RecipeError, did_you_mean
from drawloom.graph.recipe.layers import Layer
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.toml.parsing import MAX_FILE_BYTES, decode, parse

MAX_BASES = 50
"""Recipes in a chain of `extends`; more than any project needs, and far below Python's recursion limit."""


class _Base(NamedTuple):
    """A recipe to extend: its file, its name for messages, and the position of the reference to it."""

    path: Path
    name: str
    position: Position


@attrs.frozen
class RecipeFolder:
    """The folder of shipped recipes, in sub-folders by topic, named without path or suffix."""

    folder: Path

    @cached_property
    def paths(self) -> dict[str, Path]:
        """The recipes' files by name, sorted."""
        return {path.stem: path for path in sorted(self.folder.rglob("*.toml"), key=lambda path: path.stem)}

    @property
    def names(self) -> list[str]:
        """The sorted recipe names in the folder."""
        return [*self.paths]

    def find(self, name: str) -> Path | None:
        """Return a shipped recipe's file, or None."""
        return self.paths.get(name)

    def contains(self, path: Path) -> bool:
        """Return whether a file is in the folder."""
        return path.resolve().is_relative_to(self.folder.resolve())


def read_layers(
    recipe: str, overlays: Sequence[str], folder: RecipeFolder, unsaved: Mapping[Path, str] | None = None
) -> list[Layer]:
    """
    Read the layers of a recipe and its overlays, lowest first. Raises RecipeError with every unreadable file.

    `unsaved` maps resolved paths to texts replacing the files, such as documents open in an editor.
    """
    reader = _Reader(folder, unsaved or {})
    for name in (recipe, *overlays):
        reader.read_named(name)
    if reader.problems:
        raise RecipeError(reader.problems)
    return reader.layers


def read_bases_and_layer(layer: Layer, folder: RecipeFolder) -> list[Layer]:
    """
    Read the layers of a layer's bases, lowest first, and append the layer itself.

    Raises RecipeError with every unreadable base. Paths are relative to the folder of the layer's source.
    """
    reader = _Reader(folder, {})
    reader.add_with_bases(layer, Path(layer.source), ())
    if reader.problems:
        raise RecipeError(reader.problems)
    return reader.layers


@attrs.define
class _Reader:
    """
    Reader for layers. It puts every base once below all recipes extending it: no base can undo another base's changes.
    """

    folder: RecipeFolder
    unsaved: Mapping[Path, str]
    layers: list[Layer] = attrs.field(factory=list)
    problems: list[Problem] = attrs.field(factory=list)
    _read_paths: set[Path] = attrs.field(factory=set)

    def read_named(self, name: str) -> None:
        """Read a recipe by path, run folder or shipped name."""
        shipped = self.folder.find(name)
        if os.path.isfile(os.path.join(name, LOCK)):
            self._read_and_add_recipe(Path(name, LOCK), os.path.join(name, LOCK), COMMAND_LINE, ())
        elif name.endswith(".toml") or os.path.isfile(name):
            self._read_and_add_recipe(Path(name), name, COMMAND_LINE, ())
        elif shipped:
            self._read_and_add_recipe(shipped, _relative_to_cwd(shipped), COMMAND_LINE, ())
        else:
            similar = next(_find_file_and_run_folders_named(name), None)
            hint = f"did you mean {similar!r}?" if similar else did_you_mean(name, self.folder.names)
            text = f"there is no recipe {name!r}: it is not a file, a run folder or a shipped name"
            self._add_problem("DL101", text, hint, COMMAND_LINE)

    def _read_and_add_recipe(
        self, path: Path, name: str, requester: Position, extending_recipes: tuple[Path, ...]
    ) -> None:
        text = self._read_text(path, name, requester)
        data = None if text is None else self._parse(text, name)
        if text is None or data is None:
            return
        label = path.name if self.folder.contains(path) else name
        self.add_with_bases(
            Layer(name, data, text, label=label, is_base=bool(extending_recipes)), path, extending_recipes
        )

    def add_with_bases(self, layer: Layer, path: Path, extending_recipes: tuple[Path, ...]) -> None:
        """Add a layer, and below it its bases. `extending_recipes` extend it, the outermost first."""
        chain = (*extending_recipes, path.resolve())
        for base, base_name, position in self._iterate_bases(layer, path):
            if base.resolve() in chain:
                self._add_problem("DL104", f"{base_name} extends itself through {layer.source}", "", position)
            # resolve(): the same base may be reached by different paths and links.
            elif len(chain) >= MAX_BASES:
                text = f"{base_name} is the base of {MAX_BASES} recipes in a chain of `extends`"
                self._add_problem("DL104", text, "merge some of them", position)
            elif base.resolve() not in self._read_paths:
                self._read_and_add_recipe(base, base_name, position, chain)
        self._read_paths.add(path.resolve())
        self.layers.append(layer)

    def _iterate_bases(self, layer: Layer, path: Path) -> Iterator[_Base]:
        """Yield the bases in `extends`; report the missing ones."""
        extends = layer.data.get("extends", [])
        names = [extends] if isinstance(extends, str) else extends
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            position = layer.value_position(("extends",))
            self._add_problem(
                "DL105", "extends must be a string or an array of strings", 'write extends = "pretrain"', position
            )
            return
        for name, number in _iterate_first_indices(names):
            position = layer.value_position(("extends",) if isinstance(extends, str) else ("extends", number))
            if name.endswith(".toml"):
                yield from self._resolve_base_in_allowed_folders(layer, path, name, position)
            elif shipped := self.folder.find(name):
                yield _Base(shipped, _relative_to_cwd(shipped), position)
            else:
                hint = did_you_mean(name, self.folder.names)
                self._add_problem("DL101", f"extends {name!r}, which is not a shipped recipe", hint, position)

    def _resolve_base_in_allowed_folders(
        self, layer: Layer, path: Path, name: str, position: Position
    ) -> Iterator[_Base]:
        """Yield a base given as a path beside the recipe; report it instead if it is outside the allowed folders."""
        target = path.parent / name.replace("\0", "")  # system calls refuse NUL
        # A recipe from a stranger must not read arbitrary files of this machine; "../mine.toml" is a user's own file.
        allowed = (Path.cwd().resolve(), path.parent.resolve().parent)
        if Path(name).is_absolute() or not any(target.resolve().is_relative_to(parent) for parent in allowed):
            text = (
                f"extends {name!r}, which is outside the current directory and the parent folder of the recipe's folder"
            )
            self._add_problem("DL106", text, "move the base beside the recipe, or into the folder above", position)
            return
        yield _Base(target, os.path.normpath(Path(layer.source).parent / name), position)

    def _read_text(self, path: Path, name: str, requester: Position) -> str | None:
        """Return a recipe's text, unsaved or from its file; report a problem and return None if it can't be read."""
        if (unsaved := self.unsaved.get(path.resolve())) is not None:
            return unsaved
        try:
            if not path.exists():
                near = _find_similar_file(name)
                hint = f"did you mean {near!r}?" if near else ""
                self._add_problem("DL102", f"{name} can't be read: there is no such file", hint, requester)
                return None
            if not path.is_file():
                raise OSError("it is a folder" if path.is_dir() else "it is not a regular file")
            with open(path, "rb") as file:
                return decode(
                    file.read(MAX_FILE_BYTES + 1)
                )  # one byte more than allowed shows that the file is too large
        except OSError as error:
            self._add_problem("DL102", f"{name} can't be read: {error.strerror or error}", "", requester)
        except ValueError as error:
            self._add_problem("DL102", f"{name} can't be read: {error}", "", requester)
        return None

    def _parse(self, text: str, name: str) -> dict[str, Any] | None:
        try:
            return parse(text, name)
        except RecipeError as error:
            self.problems += error.problems
        return None

    def _add_problem(self, code: str, text: str, hint: str, position: Position) -> None:
        self.problems.append(Problem(code, text, hint, position=position))


def _iterate_first_indices(names: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the names without duplicates, with their first indices."""
    seen: set[str] = set()
    for number, name in enumerate(names):
        if name not in seen:
            seen.add(name)
            yield name, number


def _find_file_and_run_folders_named(name: str) -> Iterator[str]:
    """Yield the file and the run folders, one level down, with this name."""
    if os.path.isfile(f"{name}.toml"):
        yield f"{name}.toml"
    if name and name == os.path.basename(name):
        yield from sorted(os.path.dirname(lock) for lock in glob(os.path.join("*", escape(name), LOCK)))


def _find_similar_file(path: str) -> str | None:
    """Return the TOML file with the most similar name in a path's folder, or None."""
    from drawloom.graph.spelling import find_nearest

    folder, name = os.path.split(path)
    stems = (file.removesuffix(".toml") for file in glob("*.toml", root_dir=folder or None))
    near = find_nearest(name.removesuffix(".toml"), stems)
    return near and os.path.join(folder, f"{near}.toml")


def _relative_to_cwd(path: Path) -> str:
    """Return a path relative to the current directory, for messages."""
    return os.path.relpath(path.resolve(), Path.cwd().resolve())
