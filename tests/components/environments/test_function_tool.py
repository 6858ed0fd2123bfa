"""JSON schemas of functions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from drawloom.components.environments.function_tool import make_tool_schema
from support.runs import drawloom


def search(query: str, pages: list[int], size: float | None = None, order: Literal["new", "old"] = "new") -> str:
    """
    Find pages.

    Args:
        query: the words
        pages: numbers
        size: a number
        order: the first
    """
    return query


def test_a_schema_has_the_types_that_transformers_reads() -> None:
    """Names, types and required parameters equal transformers', which reads descriptions from the docstring."""
    ours, theirs = make_tool_schema(search)["function"], get_json_schema(search)["function"]
    assert ours["name"] == theirs["name"] and theirs["description"] in ours["description"]
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    wanted = {name: {**kind} for name, kind in theirs["parameters"]["properties"].items()}
    for kind in wanted.values():
        del kind["description"]
    wanted["size"] = {"anyOf": [{"type": "number"}, {"type": "null"}]}  # there it is "nullable", before JSON schema's
    wanted["order"].pop("type")
    assert ours["parameters"]["properties"] == wanted


def takes_anything(*words: str) -> str:
    return ""


def untyped(word) -> str:  # type: ignore[no-untyped-def]
    return str(word)


def odd(word: dict[str, int]) -> str:
    return ""


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (takes_anything, r"the tool takes_anything takes \*args, \*\*kwargs or a parameter without a name: \*words"),
        (untyped, "the tool untyped has a parameter without a type: word"),
        (odd, r"the tool odd has a parameter of the type dict\[str, int\]"),
    ],
)
def test_an_unusable_signature_is_named(function: Callable[..., Any], text: str) -> None:
    """The message names the tool and its parameter."""
    with pytest.raises(ValueError, match=text):
        make_tool_schema(function)


def test_check_names_tools_without_a_usable_signature(tmp_path: Path) -> None:
    """The problem is at the tool's `use`, beside all others."""
    (tmp_path / "mine.py").write_text(
        "from drawloom import tool\n\n\n@tool\ndef look(*words):\n    '''Look.'''\n    return words\n", "utf-8"
    )
    text = 'extends = "tools"\nvars.base = "no"\nlook.use = "mine"\nenvironment.tools = ["@look"]\n'
    (tmp_path / "bad.toml").write_text(text, "utf-8")
    (outcome,) = drawloom(tmp_path, "check", "bad.toml", "--import", "mine.py", "--format", "json")
    (problem,) = [problem for problem in json.loads(outcome.text)["problems"] if "look" in json.dumps(problem)]
    assert "the tool look takes *args" in problem["text"] and problem["line"] == 3, problem
