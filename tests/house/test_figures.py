"""The counts of `make figures`."""

import ast
import statistics
from pathlib import Path

from support import structure
from support.imports import count_circles

HERE = structure.ROOT / "components" / "module.py"


def _trees(text: str, path: Path = HERE) -> dict[Path, ast.Module]:
    return {path: ast.parse(text)}


def test_code_lines_are_neither_blank_nor_comments_nor_docstrings() -> None:
    """A string of several lines is code unless it stands alone; a comment after code is on a line of code."""
    text = '"""A module."""\n\n# why\nx = """a\nb"""  # there\n\n\ndef f():\n    """Do."""\n    return x\n'
    assert structure.code_lines(text) == 4


def test_families_are_short() -> None:
    """A model family has at most 350 code lines of its own, and half of the families have less than 120."""
    paths = (structure.ROOT / "components" / "model").rglob("*.py")
    lines = structure.family_lines({path: path.read_text("utf-8") for path in paths})
    assert {"model.llama", "model.qwen3.moe", "model.glm4_moe_lite"} <= lines.keys()
    assert max(lines.values()) <= 350 and statistics.median(lines.values()) < 120


def test_passed_and_compared_dimension_names_are_counted() -> None:
    """A dimension's name in a string counts outside components/parallel, and does not count in a docstring."""
    text = '"""context"""\nmesh.size("tensor")\nif name == "expert": sizes["pipeline"]\nother("row")\n'
    assert len(structure.dimension_literals(_trees(text))) == 3
    assert structure.dimension_literals(_trees(text, HERE.parent / "parallel" / "tensor.py")) == []


def test_an_optional_attribute_is_declared_by_a_protocol() -> None:
    """Protocol members, module members and reads without a default are not undeclared attributes."""
    reads = 'getattr(node, "one", 1), hasattr(node, "two"), hasattr(os, "three"), getattr(node, "four")'
    protocol = "class P(Protocol):\n    one: int"
    sites = structure.undeclared_attributes(_trees(f"import os\n{protocol}\nx = {reads}\n"))
    assert [site.split()[1] for site in sites] == ["two"]


def test_tuples_unpacked_into_named_parameters_are_counted() -> None:
    """Unpacking a tuple for a variadic function or a function of a library does not count."""
    text = "def f(a, b): ...\ndef g(*a): ...\nf(*pair)\ng(*pair)\nprint(*pair)\nf(*[1, 2])\n"
    assert [site.split()[1] for site in structure.unpacked_tuples(_trees(text))] == ["*pair"]


def test_two_circles_are_counted() -> None:
    """Import circles without a common module are counted separately."""
    texts = {"a": "import b", "b": "import a", "c": "import d", "d": "import c", "e": "import a"}
    assert count_circles(texts) == 2
