"""The problems of a recipe as an editor marks them: each with a range of the document."""

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

from drawloom.graph.lsp.workspace import Workspace
from drawloom.graph.problems import Place, Problem

# A header or array, an inline table, quotes that begin a long string, a string, any other value.
_MARKED = re.compile(r"\[\[?[^\]\n]*\]{0,2}|\{[^}\n]*\}?|\"\"\"|'''|\"(?:[^\"\\\n]|\\.)*+\"?|'[^'\n]*+'?|[^\s,\]}#=]+")

_EXTENDS = re.compile(r"^extends\b.*", re.MULTILINE)


@attrs.frozen
class Diagnostic:
    """A problem with a range of the document; `elsewhere` is its place if that is in another file."""

    problem: Problem
    start: int
    end: int
    elsewhere: Place | None = None

    @property
    def message(self) -> str:
        """The problem as `check` prints it, without a position in this document and without the code."""
        place = self.elsewhere and f"{self.elsewhere}: "
        node = self.problem.node and f"[{self.problem.node}] "
        hint = self.problem.hint and f"; {self.problem.hint}"
        return f"{place or ''}{node}{self.problem.text}{hint}"


def diagnose(workspace: Workspace, path: Path) -> Iterator[Diagnostic]:
    """The problems of an open recipe; one of a recipe that it extends is marked at `extends`."""
    text = workspace.texts[path]
    for problem in workspace.check(path):
        place = problem.place
        if place is not None and place.line and Path(place.source).resolve() == path:
            start = offset_of(text, place)
            found = _MARKED.match(text, start)
            # At the end of a line there is nothing that an editor could underline.
            begin, end = found.span() if found else (max(start - 1, 0), start)
            yield Diagnostic(problem, begin, end)
        else:
            extends = _EXTENDS.search(text)
            start, end = extends.span() if extends else (0, 0)
            yield Diagnostic(problem, start, end, place)


def offset_of(text: str, place: Place) -> int:
    """The offset of a line and column, which a text that has changed since may not have any more."""
    start = 0
    for _ in range(place.line - 1):
        start = text.find("\n", start) + 1 or len(text)
    return min(start + max(place.column, 1) - 1, len(text))
