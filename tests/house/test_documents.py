"""Tests that documents name exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def _tests(path: Path) -> set[str]:
    """Return the names of a test file's functions, including functions within an `if`."""
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tests_that_a_document_names_exist(document: str) -> None:
    """Every file and every test function that a document names exists."""
    for file, function in NAMED.findall((ROOT / "docs" / document).read_text("utf-8")):
        assert (ROOT / file).is_file(), file
        assert not function or (function.startswith("test_") and function in _tests(ROOT / file)), f"{file}::{function}"


def test_faults_are_numbered_without_gaps() -> None:
    """Faults are numbered from F01 without gaps, and every row names a test."""
    rows = [line.split("|") for line in (ROOT / "docs/faults.md").read_text("utf-8").splitlines() if "| F" in line[:4]]
    names = sorted((row[1].strip() for row in rows), key=lambda name: int(name[1:]))
    assert names == [f"F{number:02}" for number in range(1, len(rows) + 1)]
    assert all(NAMED.search(row[4]) for row in rows)


def test_reading_path_is_short_and_exists() -> None:
    """The files of the reading path exist, each once, and are 3,600 lines at most."""
    files = re.findall(r"^\| `([\w/]+\.py)` \|", (ROOT / "docs/reading.md").read_text("utf-8"), re.MULTILINE)
    assert len(files) == len(set(files)) > 15
    assert sum(len((ROOT / file).read_text("utf-8").splitlines()) for file in files) <= 3600
