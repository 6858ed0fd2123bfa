"""From a recipe's name to its layers: the file, the recipes that it extends, and the overlays."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from glob import escape, glob
from pathlib import Path
from typing import Any

import attrs

from drawloom.graph.problems import COMMAND_LINE, Position, Problem, RecipeError, did_you_mean, find_nearest
from drawloom.graph.recipe.layers import Layer
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.toml.parsing import MAX_FILE_BYTES, decode, parse

MAX_BASES = 50
"""Recipes in a chain of `extends`; more than any project needs, and far below Python's limit of recursion."""


@attrs.frozen
class RecipeFolder:
    """The folder of shipped recipes, which are named without path or suffix."""

    folder: Path

    @cached_property
    def names(self) -> list[str]:
        """The recipes in the folder, sorted."""
        return sorted(path.stem for path in self.folder.glob("*.toml"))

    def find(self, name: str) -> Path | None:
        """The file of a shipped recipe, or None."""
        return self.folder / f"{name}.toml" if name in self.names else None

    def contains(self, path: Path) -> bool:
        """Whether a file is in the folder."""
        return path.resolve().parent == self.folder.resolve()


def read_layers(
    recipe: str, overlays: Sequence[str], folder: RecipeFolder, unsaved: Mapping[Path, str] | None = None
) -> list[Layer]:
    """
    The layers of a recipe and its overlays, lowest first. Raises RecipeError with every file that can't be read.

    `unsaved` has texts that are read in place of files, by resolved path, as those that an editor has open.
    """
    reader = _Reader(folder, unsaved or {})
    for name in (recipe, *overlays):
        reader.read_named(name)
    if reader.problems:
        raise RecipeError(reader.problems)
    return reader.layers


def read_bases(layer: Layer, folder: RecipeFolder) -> list[Layer]:
    """
    Return the layers of the recipes that a layer extends, lowest first, and then the layer itself.

    Raises RecipeError with every base that can't be read. Paths are relative to the folder of the layer's source.
    """
    reader = _Reader(folder, {})
    reader.add(layer, Path(layer.source), ())
    if reader.problems:
        raise RecipeError(reader.problems)
    return reader.layers


@attrs.define
class _Reader:
    """Reads each base once, below all recipes that extend it, so that it can't undo what another base changed."""

    folder: RecipeFolder
    unsaved: Mapping[Path, str]
    layers: list[Layer] = attrs.field(factory=list)
    problems: list[Problem] = attrs.field(factory=list)
    _done: set[Path] = attrs.field(factory=set)

    def read_named(self, name: str) -> None:
        """Read a recipe by path, run folder or shipped name."""
        shipped = self.folder.find(name)
        if os.path.isfile(os.path.join(name, LOCK)):
            self._read(Path(name, LOCK), os.path.join(name, LOCK), COMMAND_LINE, ())
        elif name.endswith(".toml") or os.path.isfile(name):
            self._read(Path(name), name, COMMAND_LINE, ())
        elif shipped:
            self._read(shipped, _relative_to_cwd(shipped), COMMAND_LINE, ())
        else:
            known = next(_find_namesakes(name), None)
            hint = f"did you mean {known!r}?" if known else did_you_mean(name, self.folder.names)
            text = f"there is no recipe {name!r}: it is not a file, a run folder or a shipped name"
            self._problem("DL101", text, hint, COMMAND_LINE)

    def _read(self, path: Path, shown: str, asked: Position, above: tuple[Path, ...]) -> None:
        text = self._text(path, shown, asked)
        data = None if text is None else self._parse(text, shown)
        if text is None or data is None:
            return
        label = path.name if self.folder.contains(path) else shown
        self.add(Layer(shown, data, text, label=label, is_base=bool(above)), path, above)

    def add(self, layer: Layer, path: Path, above: tuple[Path, ...]) -> None:
        """Add a layer, and below it the recipes that it extends; `above` are those that extend it."""
        within = (*above, path.resolve())
        for base, base_shown, position in self._bases(layer, path):
            if base.resolve() in within:
                self._problem("DL104", f"{base_shown} extends itself, by way of {layer.source}", "", position)
            # resolve(): the same base may be reached by different paths and links.
            elif len(within) >= MAX_BASES:
                text = f"{base_shown} is the base of {MAX_BASES} recipes that extend each other in a row"
                self._problem("DL104", text, "merge some of them", position)
            elif base.resolve() not in self._done:
                self._read(base, base_shown, position, within)
        self._done.add(path.resolve())
        self.layers.append(layer)

    def _bases(self, layer: Layer, path: Path) -> Iterator[tuple[Path, str, Position]]:
        extends = layer.data.get("extends", [])
        names = [extends] if isinstance(extends, str) else extends
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            position = layer.value(("extends",))
            self._problem(
                "DL105", "extends takes a string or an array of strings", 'write extends = "pretrain"', position
            )
            return
        for name, number in _first_indices(names):
            position = layer.value(("extends",) if isinstance(extends, str) else ("extends", number))
            if name.endswith(".toml"):
                yield from self._beside(layer, path, name, position)
            elif shipped := self.folder.find(name):
                yield shipped, _relative_to_cwd(shipped), position
            else:
                hint = did_you_mean(name, self.folder.names)
                self._problem("DL101", f"extends {name!r}, which is not a shipped recipe", hint, position)

    def _beside(self, layer: Layer, path: Path, name: str, position: Position) -> Iterator[tuple[Path, str, Position]]:
        target = path.parent / name.replace("\0", "")  # system calls refuse NUL
        # A recipe from elsewhere must not read arbitrary files of this machine; "../mine.toml" is one's own.
        allowed = (Path.cwd().resolve(), path.parent.resolve().parent)
        if Path(name).is_absolute() or not any(target.resolve().is_relative_to(parent) for parent in allowed):
            text = f"extends {name!r}, which is outside of the current directory and of the folder above the recipe"
            self._problem("DL106", text, "put the base beside the recipe, or into the folder above", position)
            return
        yield target, os.path.normpath(Path(layer.source).parent / name), position

    def _text(self, path: Path, shown: str, asked: Position) -> str | None:
        if (unsaved := self.unsaved.get(path.resolve())) is not None:
            return unsaved
        try:
            if not path.exists():
                near = _find_similar_file(shown)
                hint = f"did you mean {near!r}?" if near else ""
                self._problem("DL102", f"{shown} can't be read: there is no such file", hint, asked)
                return None
            if not path.is_file():
                raise OSError("it is a folder" if path.is_dir() else "it is not a regular file")
            with open(path, "rb") as file:
                return decode(file.read(MAX_FILE_BYTES + 1))  # one byte more shows that it is too large
        except OSError as error:
            self._problem("DL102", f"{shown} can't be read: {error.strerror or error}", "", asked)
        except ValueError as error:
            self._problem("DL102", f"{shown} can't be read: {error}", "", asked)
        return None

    def _parse(self, text: str, shown: str) -> dict[str, Any] | None:
        try:
            return parse(text, shown)
        except RecipeError as error:
            self.problems += error.problems
        return None

    def _problem(self, code: str, text: str, hint: str, position: Position) -> None:
        self.problems.append(Problem(code, text, hint, position=position))


def _first_indices(names: list[str]) -> Iterator[tuple[str, int]]:
    """The names without duplicates, each with its first index."""
    seen: set[str] = set()
    for number, name in enumerate(names):
        if name not in seen:
            seen.add(name)
            yield name, number


def _find_namesakes(name: str) -> Iterator[str]:
    """The file and the run folders, one level down, that have this name."""
    if os.path.isfile(f"{name}.toml"):
        yield f"{name}.toml"
    if name and name == os.path.basename(name):
        yield from sorted(os.path.dirname(lock) for lock in glob(os.path.join("*", escape(name), LOCK)))


def _find_similar_file(path: str) -> str | None:
    """The TOML file with the most similar name in the folder of a path; None if there is none."""
    folder, name = os.path.split(path)
    names = (each.removesuffix(".toml") for each in glob("*.toml", root_dir=folder or None))
    near = find_nearest(name.removesuffix(".toml"), names)
    return near and os.path.join(folder, f"{near}.toml")


def _relative_to_cwd(path: Path) -> str:
    """A path relative to the current directory, for messages."""
    return os.path.relpath(path.resolve(), Path.cwd().resolve())
