"""
serve commands to an agent over the Model Context Protocol, on stdin and stdout

A tool is a command with `--format json`: the schemas of its input and output are those of the command's arguments and
result. Every call is a process of its own, so a failing run ends alone. A cancelled run is stopped with SIGTERM, and
saves its step.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from drawloom.components.data.sources.files import import_optional_package
from drawloom.graph.cli.command import Command, Project, command
from drawloom.graph.cli.main import find_command_files, load_command
from drawloom.graph.cli.schemas import format_words, make_arguments_schema, read_result_schema

TOOLS = ("check", "explain", "plan", "list", "run", "runs", "why", "compare")
"""Served commands."""

READ_ONLY = {*TOOLS} - {"run"}

MAX_STDERR = 4000
"""Characters from the end of standard error in an answer."""


@command
class McpCommand(Command):
    """A server until stdin is closed."""

    epilog: ClassVar[str] = "The tools work in the current folder."

    def run(self, project: Project) -> None:
        import_optional_package("mcp", "pip install 'drawloom[mcp]'")
        asyncio.run(_serve(project, self.imports))


async def _serve(project: Project, imports: Sequence[str]) -> None:
    from mcp import types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server

    # a command's name, summary, arguments and result schema
    tools = [
        types.Tool(
            name=name,
            description=find_command_files(project)[name].summary,
            input_schema=make_arguments_schema(load_command(project, name)),
            output_schema=read_result_schema(project, name),
            annotations=types.ToolAnnotations(read_only_hint=name in READ_ONLY),
        )
        for name in TOOLS
    ]

    async def list_tools(_context: Any, _params: Any) -> Any:
        return types.ListToolsResult(tools=tools)

    async def call_tool(_context: Any, params: Any) -> Any:
        if params.name not in TOOLS:
            text = f"there is no tool {params.name!r}"
            return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)
        words = format_words(load_command(project, params.name), params.arguments or {})
        options = [f"--import={path}" for path in imports]
        data, text = await _run_command_and_get_json_and_stderr(
            project, [params.name, *words, *options, "--format=json"]
        )
        content: list[Any] = [
            types.TextContent(text=part) for part in (json.dumps(data, allow_nan=False), text) if part
        ]
        return types.CallToolResult(content=content, structured_content=data, is_error="error" in data)

    server = Server(
        "drawloom",
        instructions="Train language models from recipes of components. See AGENTS.md for the usual order of commands.",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    async with stdio_server() as (read_stream, write_stream):
        await server.run(read_stream, write_stream, server.create_initialization_options())


async def _run_command_and_get_json_and_stderr(project: Project, words: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Run a command, and return its JSON and the end of its standard error."""
    program = project.registry.package.partition(".")[0]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", program, *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
    text = err.decode("utf-8", "replace")[-MAX_STDERR:]
    try:
        return json.loads(out), text
    except ValueError:  # the process has crashed or was killed
        return {"error": {"exit_code": process.returncode, "text": text, "problems": []}}, ""
