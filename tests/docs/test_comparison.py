"""Line counts in docs/comparison.md match its blocks."""

import ast
import re
from pathlib import Path

from support.blocks import blocks

DOCS = Path(__file__).parents[2] / "docs"


def test_lines_of_the_tasks_are_counted() -> None:
    """Every row states its block's lines of TOML, and for the loss also the Python lines in docs/components.md."""
    counts = [f"{len(block.text.split(chr(10))) - 1} TOML" for block in blocks(DOCS / "comparison.md")]
    [loss] = [block.text for block in blocks(DOCS / "components.md") if block.title == "my_lab/focal.py"]
    counts[4] += f", {count_code_lines(loss)} Python"
    rows = re.findall(r"^\| \d\. [^|]+\| ([^|]+?) \|", (DOCS / "comparison.md").read_text("utf-8"), re.MULTILINE)
    assert rows == counts


def count_code_lines(source: str) -> int:
    """Count the lines that are not blank, comments, docstrings or imports."""
    ignored = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), 1)
    return sum(1 for number, line in lines if line.strip() and line.strip()[0] != "#" and number not in ignored)
