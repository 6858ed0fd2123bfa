"""From a recipe's name to its layers: files, what they extend, overlays, and the command line."""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from drawloom.graph.problems import COMMAND_LINE, Place, Problem, RecipeError
from drawloom.graph.recipe.layers import Layer
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.toml.parsing import LARGEST, Unreadable, decode, parse
from drawloom.graph.toml.suggest import did_you_mean


@attrs.frozen
class RecipeFolder:
    """The folder of recipes that may be named without path or suffix."""

    folder: Path

    @cached_property
    def names(self) -> list[str]:
        """What stands there."""
        return sorted(path.stem for path in self.folder.glob("*.toml"))

    def find(self, name: str) -> Path | None:
        """The file of a name."""
        return self.folder / f"{name}.toml" if name in self.names else None

    def holds(self, path: Path) -> bool:
        """Whether a file stands there."""
        return path.resolve().parent == self.folder.resolve()


def read_layers(recipe: str, overlays: Sequence[str], overrides: dict[str, Any], shelf: RecipeFolder) -> list[Layer]:
    """All layers of a recipe, lowest first; a RecipeError with every file that can't be read."""
    reader = _Reader(shelf)
    for name in (recipe, *overlays):
        reader.read_named(name)
    if reader.problems:
        raise RecipeError(reader.problems)
    return [*reader.layers, Layer(str(COMMAND_LINE), overrides)]


@attrs.define
class _Reader:
    """Reads each base once, below all that extend it, so that it can't undo what another base of it has changed."""

    shelf: RecipeFolder
    layers: list[Layer] = attrs.field(factory=list)
    problems: list[Problem] = attrs.field(factory=list)
    _done: set[Path] = attrs.field(factory=set)

    def read_named(self, name: str) -> None:
        """A recipe as a person names it: a path, a run folder, or a shipped name."""
        shipped = self.shelf.find(name)
        if os.path.isfile(os.path.join(name, LOCK)):
            self._read(Path(name, LOCK), os.path.join(name, LOCK), COMMAND_LINE, ())
        elif name.endswith(".toml") or os.path.isfile(name):
            self._read(Path(name), name, COMMAND_LINE, ())
        elif shipped:
            self._read(shipped, _shown(shipped), COMMAND_LINE, ())
        else:
            hint = did_you_mean(name, self.shelf.names)
            text = f"there is no recipe {name!r}: it is no file, no run folder and no shipped name"
            self._problem("DL101", text, hint, COMMAND_LINE)

    def _read(self, path: Path, shown: str, asked: Place, above: tuple[Path, ...]) -> None:
        text = self._text(path, shown, asked)
        data = None if text is None else self._parse(text, shown)
        if text is None or data is None:
            return
        layer = Layer(shown, data, text, label=path.name if self.shelf.holds(path) else shown)
        within = (*above, path.resolve())
        for base, base_shown, place in self._bases(layer, path):
            if base.resolve() in within:
                self._problem("DL104", f"{base_shown} extends itself, by way of {shown}", "", place)
            elif base.resolve() not in self._done:
                self._read(base, base_shown, place, within)
        self._done.add(path.resolve())
        self.layers.append(layer)

    def _bases(self, layer: Layer, path: Path) -> Iterator[tuple[Path, str, Place]]:
        extends = layer.data.get("extends", [])
        names = [extends] if isinstance(extends, str) else extends
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            place = layer.value(("extends",))
            self._problem("DL105", "extends takes a string or an array of strings", 'write extends = "pretrain"', place)
            return
        for name, number in _first_of_each(names):
            place = layer.value(("extends",) if isinstance(extends, str) else ("extends", number))
            if name.endswith(".toml"):
                yield from self._beside(layer, path, name, place)
            elif shipped := self.shelf.find(name):
                yield shipped, _shown(shipped), place
            else:
                hint = did_you_mean(name, self.shelf.names)
                self._problem("DL101", f"extends {name!r}, which is no shipped recipe", hint, place)

    def _beside(self, layer: Layer, path: Path, name: str, place: Place) -> Iterator[tuple[Path, str, Place]]:
        target = path.parent / name.replace("\0", "")
        rooms = (Path.cwd().resolve(), path.parent.resolve())
        if Path(name).is_absolute() or not any(target.resolve().is_relative_to(room) for room in rooms):
            text = f"extends {name!r}, which leads out of the current directory and of the recipe's own folder"
            self._problem("DL106", text, "put the base beside the recipe", place)
            return
        yield target, os.path.normpath(Path(layer.source).parent / name), place

    def _text(self, path: Path, shown: str, asked: Place) -> str | None:
        try:
            if not path.is_file():
                there = "it is no regular file" if path.exists() else "there is no such file"
                raise FileNotFoundError("it is a folder" if path.is_dir() else there)
            with open(path, "rb") as file:
                return decode(file.read(LARGEST + 1))
        except Unreadable as error:
            self._problem("DL102", f"{shown} can't be read: {error.text}", error.hint, asked)
        except OSError as error:
            self._problem("DL102", f"{shown} can't be read: {error.strerror or error}", "", asked)
        return None

    def _parse(self, text: str, shown: str) -> dict[str, Any] | None:
        try:
            return parse(text)
        except Unreadable as error:
            self._problem("DL103", error.text, error.hint, Place(shown, error.line, error.column))
        return None

    def _problem(self, code: str, text: str, hint: str, place: Place) -> None:
        self.problems.append(Problem(code, text, hint, place=place))


def _first_of_each(names: list[str]) -> Iterator[tuple[str, int]]:
    """Each name once, with where it stands first."""
    seen: set[str] = set()
    for number, name in enumerate(names):
        if name not in seen:
            seen.add(name)
            yield name, number


def _shown(path: Path) -> str:
    """A path as people should see it: from where they stand."""
    return os.path.relpath(path.resolve(), Path.cwd().resolve())
