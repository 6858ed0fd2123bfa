"""A recipe is typed letter by letter, as a person would, and what the editor shows is written down."""

import tempfile
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp

from support.editor import Editor

NAME = "mine.toml"


class Session:
    """One document, and the lines of the record."""

    def __init__(self, editor: Editor) -> None:
        self.editor, self.text, self.lines = editor, "", list[str]()

    def type(self, text: str) -> None:
        """Type letters at the end; records the problems after the last one, and how many there were at most."""
        most = 0
        for letter in text:
            self.text += letter
            most = max(most, len(self.editor.type(NAME, self.text)))
        self.lines += [f"| {line}" for line in text.splitlines()]
        self._show("problem", self.editor.problems(NAME))
        self.lines.append(f"  (at most {most} at once)")

    def complete(self, accept: str) -> None:
        """Ask what may come at the end, and take one of it."""
        items = sorted(self._ask("completion").items, key=lambda item: item.sort_text)
        self._show("offered", [f"{item.label}  {item.detail}".rstrip() for item in items if item.sort_text[0] == "0"])
        edit: Any = next(item.text_edit for item in items if item.label == accept)
        before, last = self.text[: self.text.rfind("\n") + 1], self.text[self.text.rfind("\n") + 1 :]
        self.text = before + last[: edit.range.start.character] + edit.new_text + last[edit.range.end.character :]
        self.editor.type(NAME, self.text)
        self.lines.append(f"| {self.text.splitlines()[-1]}")

    def hover(self, at: str) -> None:
        """Point to something."""
        self._show(f"hover {at}", self.editor.ask("hover", NAME, at).contents.value.splitlines()[1:-1])

    def define(self, at: str) -> None:
        """Go to a definition."""
        places = self.editor.ask("definition", NAME, at)
        self._show(f"definition {at}", [f"{Path(place.uri).name}:{place.range.start.line + 1}" for place in places])

    def rename(self, at: str, new: str) -> None:
        """Rename something, in this document and in others."""
        edits = self.editor.ask("rename", NAME, at, new_name=new).changes
        found = [f"{Path(uri).name}:{edit.range}" for uri, all_of in edits.items() for edit in all_of]
        self._show(f"rename {at} to {new}", found)

    def _ask(self, method: str) -> Any:
        line, column = self.text.count("\n"), len(self.text) - self.text.rfind("\n") - 1
        return self.editor.ask_at(method, NAME, lsp.Position(line, column))

    def _show(self, what: str, lines: list[str]) -> None:
        self.lines += [f"  {what}: {line}" for line in lines or ["none"]]


def record() -> str:
    """A recipe of the shop from its first letter on, with a base beside it."""
    with tempfile.TemporaryDirectory() as folder, Editor(Path(folder).resolve()) as editor:
        base = 'extends = "small"\n\n[kiosk]\nuse = "pages.plain"\ntitle = "Kiosk"\n'
        (Path(folder) / "base.toml").write_text(base, "utf-8")
        session = Session(editor)
        session.type('extends = "')
        session.complete("base.toml")
        session.type("\n\n[sto")
        session.complete("store")
        session.type("]\nsi")
        session.complete("size")
        session.type(" = 0")
        session.hover("si|ze")
        session.type('\n\n[menu]\nuse = "me')
        session.complete("pages.menu")
        session.type('\nlinks = { home = "@')
        session.complete("@kiosk")
        session.type(' }\n\n[trainer]\npages = ["@menu", "@stor", "@')
        session.complete("@kiosk")
        session.type("]\nworkers = 3\n")
        session.hover('"@me|nu"')
        session.define('{ home = "@ki|osk"')
        session.define("size| = 0")
        session.rename('{ home = "@ki|osk"', "stall")
    return "\n".join(session.lines).replace(f"{Path(folder).resolve()}/", "") + "\n"
