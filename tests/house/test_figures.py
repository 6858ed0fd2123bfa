"""The counts of `make figures`."""

import ast
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


def test_a_dimension_is_found_where_it_is_passed_or_compared() -> None:
    """A string that names a dimension counts outside the room of dimensions, and a docstring does not."""
    text = '"""context"""\nmesh.size("tensor")\nif name == "expert": sizes["pipeline"]\nother("row")\n'
    assert len(structure.dimension_literals(_trees(text))) == 3
    assert structure.dimension_literals(_trees(text, HERE.parent / "parallel" / "tensor.py")) == []


def test_an_optional_attribute_is_declared_by_a_protocol() -> None:
    """Members of protocols and of modules are no undeclared attributes, and neither is a read without a default."""
    reads = 'getattr(node, "one", 1), hasattr(node, "two"), hasattr(os, "three"), getattr(node, "four")'
    protocol = "class P(Protocol):\n    one: int"
    sites = structure.undeclared_attributes(_trees(f"import os\n{protocol}\nx = {reads}\n"))
    assert [site.split()[1] for site in sites] == ["two"]


def test_a_tuple_is_unpacked_into_parameters_with_names() -> None:
    """A function that takes any number of arguments may be given a tuple, and so may a function of others."""
    text = "def f(a, b): ...\ndef g(*a): ...\nf(*pair)\ng(*pair)\nprint(*pair)\nf(*[1, 2])\n"
    assert [site.split()[1] for site in structure.unpacked_tuples(_trees(text))] == ["*pair"]


def test_two_circles_are_counted() -> None:
    """Circles that share no module count each."""
    texts = {"a": "import b", "b": "import a", "c": "import d", "d": "import c", "e": "import a"}
    assert count_circles(texts) == 2
