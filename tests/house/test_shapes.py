"""Docstrings state tensor shapes."""

import ast
import re

from house.figures import FOLDERS, ROOT, SHAPE, Function


def test_every_forward_documents_its_shapes() -> None:
    """The docstring of every `forward` that accepts tensors has a shape."""
    silent = []
    for path in (path for name in FOLDERS for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, Function) and node.name == "forward":
                takes_tensors = re.search(r"\bTensor\b", ast.unparse(node.args))
                if takes_tensors and not SHAPE.search(ast.get_docstring(node) or ""):
                    silent.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not silent
