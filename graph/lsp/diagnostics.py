"""Problems of a recipe as an editor marks them, with ranges of the document."""

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

from drawloom.graph.lsp.workspace import Workspace
from drawloom.graph.problems import Position, Problem

# A header or array, an inline table, quotes that begin a long string, a string, any other value.
_MARKED = re.compile(r"\[\[?[^\]\n]*\]{0,2}|\{[^}\n]*\}?|\"\"\"|'''|\"(?:[^\"\\\n]|\\.)*+\"?|'[^'\n]*+'?|[^\s,\]}#=]+")

_EXTENDS = re.compile(r"^extends\b.*", re.MULTILINE)


@attrs.frozen
class Diagnostic:
    """A problem with a range of the document. `position_in_other_file` is its position in another file."""

    problem: Problem
    start: int
    end: int
    position_in_other_file: Position | None = None

    @property
    def message(self) -> str:
        """The problem as `check` prints it, without a position in this document and without the code."""
        prefix = self.position_in_other_file and f"{self.position_in_other_file}: "
        node = self.problem.node and f"[{self.problem.node}] "
        hint = self.problem.hint and f"; {self.problem.hint}"
        return f"{prefix or ''}{node}{self.problem.text}{hint}"


def diagnose(workspace: Workspace, path: Path) -> Iterator[Diagnostic]:
    """Yield an open recipe's problems. A problem of an extended recipe is marked at `extends`."""
    text = workspace.texts[path]
    for problem in workspace.analyse_and_list_problems(path):
        position = problem.position
        if position is not None and position.line and Path(position.source).resolve() == path:
            start = find_offset(text, position)
            match = _MARKED.match(text, start)
            # At the end of a line an editor has nothing to underline, so the last character is marked.
            begin, end = match.span() if match else (max(start - 1, 0), start)
            yield Diagnostic(problem, begin, end)
        else:
            extends = _EXTENDS.search(text)
            start, end = extends.span() if extends else (0, 0)
            yield Diagnostic(problem, start, end, position)


def find_offset(text: str, position: Position) -> int:
    """Return the offset of a line and column, limited to the current text."""
    start = 0
    for _ in range(position.line - 1):
        start = text.find("\n", start) + 1 or len(text)
    return min(start + max(position.column, 1) - 1, len(text))
