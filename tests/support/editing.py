"""A recipe typed letter by letter, as a user would, with a record of the editor's display."""

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
        """Type letters at the end; record the problems after the last letter, and the highest count of problems."""
        peak = 0
        for letter in text:
            self.text += letter
            peak = max(peak, len(self.editor.type(NAME, self.text)))
        self.lines += [f"| {line}" for line in text.splitlines()]
        self._show("problem", self.editor.problems(NAME))
        self.lines.append(f"  (at most {peak} at once)")

    def complete(self, accept: str) -> None:
        """Ask for completions at the end, and accept one."""
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
        locations = self.editor.ask("definition", NAME, at)
        self._show(
            f"definition {at}", [f"{Path(location.uri).name}:{location.range.start.line + 1}" for location in locations]
        )

    def rename(self, at: str, new: str) -> None:
        """Rename something, in this document and in others."""
        edits = self.editor.ask("rename", NAME, at, new_name=new).changes
        edits_shown = [
            f"{Path(uri).name}:{edit.range}" for uri, edits_of_file in edits.items() for edit in edits_of_file
        ]
        self._show(f"rename {at} to {new}", edits_shown)

    def _ask(self, method: str) -> Any:
        line, column = self.text.count("\n"), len(self.text) - self.text.rfind("\n") - 1
        return self.editor.ask_at(method, NAME, lsp.Position(line, column))

    def _show(self, request: str, lines: list[str]) -> None:
        self.lines += [f"  {request}: {line}" for line in lines or ["none"]]


def record() -> str:
    """Type a recipe of the shop from its first letter on, with a base beside it; return the record."""
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
