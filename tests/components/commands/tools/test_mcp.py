"""`drawloom mcp`, called by the SDK's own client over stdio."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from drawloom.components.commands.tools.mcp import TOOLS
from support.runs import SOURCE


async def call(folder: Path, calls: list[tuple[str, dict[str, Any]]]) -> tuple[list[Any], list[Any]]:
    """Start a server in a folder, and return its tools and the results of calls."""
    import mcp  # takes half a second, also where only other tests run

    env = {"PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])}
    parameters = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "drawloom", "mcp"], env=env, cwd=str(folder)
    )
    async with mcp.Client(parameters) as client:
        tools = (await client.list_tools()).tools
        return tools, [await client.call_tool(name, arguments) for name, arguments in calls]


def valid_answers(folder: Path, calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Check the tools, and the answers against the tools' schemas; return the answers."""
    pytest.importorskip("mcp", reason="needs the package mcp: pip install 'drawloom[mcp]'")
    tools, answers = asyncio.run(call(folder, calls))
    by_name = {tool.name: tool for tool in tools}
    assert list(by_name) == list(TOOLS)
    for (name, arguments), answer in zip(calls, answers, strict=True):
        jsonschema.validate(arguments, by_name[name].input_schema)
        jsonschema.validate(answer.structured_content, by_name[name].output_schema)
    return answers


def test_tools_are_commands(folder: Path) -> None:
    """An answer is the JSON of the command; a mistake in a recipe is an error with its problems."""
    misspelt = {"recipe": "tiny.toml", "words": ["optimizer.lrr=1"]}
    listed, failed = valid_answers(folder, [("list", {"subject": "optim.adamw"}), ("plan", misspelt)])
    assert not listed.is_error and listed.structured_content["components"][0]["fields"]
    assert failed.is_error and failed.structured_content["error"]["problems"][0]["code"] == "DL302"


@pytest.mark.soak  # every call starts Python
def test_an_agent_checks_and_runs_a_recipe(folder: Path) -> None:
    """A run started by the agent ends, and is in the list of runs."""
    calls: list[tuple[str, dict[str, Any]]] = [
        ("check", {"recipe": "tiny.toml", "words": ["optimizer.lrr=1"]}),
        ("explain", {"recipe": "tiny.toml", "target": "optimizer.lr"}),
        ("run", {"recipe": "tiny.toml", "words": ["trainer.steps=2"]}),
        ("runs", {}),
    ]
    answers = valid_answers(folder, calls)
    assert not any(answer.is_error for answer in answers)
    check, explain, run, runs = (answer.structured_content for answer in answers)
    assert [problem["code"] for problem in check["problems"]] == ["DL302"]
    assert "learning rate" in explain["text"]
    assert run["outcome"]["trainer"]["step"] == 2
    assert [(row["run"], row["state"]) for row in runs["runs"]] == [("tiny", "finished")]
