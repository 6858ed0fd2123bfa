"""From a recipe's name to its layers: files, what they extend, overlays, and the command line."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomli

from drawloom.graph.layers import Layer
from drawloom.graph.problems import COMMAND_LINE, Place, Problem, RecipeError
from drawloom.graph.suggest import did_you_mean

LARGEST = 1 << 20
"""Bytes of a recipe file; one that is larger is no recipe."""


@attrs.frozen
class Shelf:
    """The folder of recipes that may be named without path or suffix."""

    folder: Path

    def names(self) -> list[str]:
        """What stands there."""
        return sorted(path.stem for path in self.folder.glob("*.toml"))

    def find(self, name: str) -> Path | None:
        """The file of a name."""
        return self.folder / f"{name}.toml" if name in self.names() else None


def read_layers(recipe: str, overlays: Sequence[str], overrides: dict[str, Any], shelf: Shelf) -> list[Layer]:
    """All layers of a recipe, lowest first; a RecipeError with every file that can't be read."""
    reader = _Reader(shelf)
    for name in (recipe, *overlays):
        reader.read_named(name)
    if reader.problems:
        raise RecipeError(reader.problems)
    return [*reader.layers, Layer("command line", overrides)]


@attrs.define
class _Reader:
    shelf: Shelf
    layers: list[Layer] = attrs.field(factory=list)
    problems: list[Problem] = attrs.field(factory=list)

    def read_named(self, name: str) -> None:
        """A recipe as a person names it: a path, or a shipped name."""
        shipped = self.shelf.find(name)
        if name.endswith(".toml") or Path(name).is_file():
            self._read(Path(name), name, COMMAND_LINE, ())
        elif shipped:
            self._read(shipped, _shown(shipped), COMMAND_LINE, ())
        else:
            hint = did_you_mean(name, self.shelf.names())
            self._problem("DL101", f"there is no recipe {name!r}, neither a file nor shipped", hint, COMMAND_LINE)

    def _read(self, path: Path, shown: str, asked: Place, above: tuple[Path, ...]) -> None:
        text = self._text(path, shown, asked)
        data = None if text is None else self._parse(text, shown)
        if text is None or data is None:
            return
        layer = Layer(shown, data, text)
        for base, base_shown, place in self._bases(layer, path):
            if base.resolve() in (*above, path.resolve()):
                self._problem("DL104", f"{base_shown} extends itself, by way of {shown}", "", place)
            else:
                self._read(base, base_shown, place, (*above, path.resolve()))
        self.layers.append(layer)

    def _bases(self, layer: Layer, path: Path) -> Iterator[tuple[Path, str, Place]]:
        extends = layer.data.get("extends", [])
        names = [extends] if isinstance(extends, str) else extends
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            place = layer.value(("extends",))
            self._problem("DL105", "extends takes a string or an array of strings", 'write extends = "pretrain"', place)
            return
        for number, name in enumerate(names):
            place = layer.value(("extends",) if isinstance(extends, str) else ("extends", number))
            if name.endswith(".toml"):
                yield from self._beside(layer, path, name, place)
            elif shipped := self.shelf.find(name):
                yield shipped, _shown(shipped), place
            else:
                hint = did_you_mean(name, self.shelf.names())
                self._problem("DL101", f"extends {name!r}, which is no shipped recipe", hint, place)

    def _beside(self, layer: Layer, path: Path, name: str, place: Place) -> Iterator[tuple[Path, str, Place]]:
        target = path.parent / name
        rooms = (Path.cwd().resolve(), path.parent.resolve())
        if Path(name).is_absolute() or not any(target.resolve().is_relative_to(room) for room in rooms):
            text = f"extends {name!r}, which leads out of the current directory and of the recipe's own folder"
            self._problem("DL106", text, "put the base beside the recipe", place)
            return
        yield target, os.path.normpath(Path(layer.source).parent / name), place

    def _text(self, path: Path, shown: str, asked: Place) -> str | None:
        try:
            if not path.is_file():
                raise FileNotFoundError("it is a folder" if path.is_dir() else "there is no such file")
            if path.stat().st_size > LARGEST:
                raise OSError("it is larger than 1 MiB, so it is no recipe")
            return path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            self._problem("DL102", f"{shown} can't be read: it is not UTF-8 (byte {error.start})", "", asked)
        except OSError as error:
            self._problem("DL102", f"{shown} can't be read: {error.strerror or error}", "", asked)
        return None

    def _parse(self, text: str, shown: str) -> dict[str, Any] | None:
        try:
            return tomli.loads(text)
        except tomli.TOMLDecodeError as error:
            self._problem("DL103", f"this is not TOML: {error.msg}", "", Place(shown, error.lineno, error.colno))
        except RecursionError:
            self._problem("DL103", "tables and arrays are nested too deeply", "", Place(shown, 1, 1))
        except ValueError as error:
            self._problem("DL103", f"this is not TOML: {error}", "", Place(shown, 1, 1))
        return None

    def _problem(self, code: str, text: str, hint: str, place: Place) -> None:
        self.problems.append(Problem(code, text, hint, place=place))


def _shown(path: Path) -> str:
    """A path as people should see it: from where they stand."""
    return os.path.relpath(path.resolve(), Path.cwd().resolve())
