"""Results of a model's tools, and a short message for every fault."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import attrs
import pytest

from drawloom.components.distributed.json_process import JsonProcess
from drawloom.components.environments import tool_process
from drawloom.components.environments.calculator import calculator
from drawloom.components.environments.tools import ToolEnvironment
from drawloom.graph import Ordered, UserError
from support import faulty_tools
from support.faulty_tools import echo, fail

SECONDS = 1.0


def open_tools(*tools: Any, **settings: Any) -> ToolEnvironment:
    environment = ToolEnvironment(tools=Ordered(tools), seconds=SECONDS, memory=0.2, characters=50, **settings)
    environment.open()
    return environment


@pytest.fixture(scope="module")
def tools() -> Iterator[ToolEnvironment]:
    with closing(open_tools(echo(), fail(), calculator(), processes=1)) as environment:
        yield environment


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "message", "faults"),
    [
        (call("echo", text="ab", times=2), "abab\n", []),
        (f"first {call('echo', text='a')} then {call('calculator', expression='(2+3)*4/5')}", "a\n4\n", []),
        (call("fail", text="print"), "fine\n", []),
        (call("fail", text="raise"), "error: LookupError: there is no such page\n", ["tool_error"]),
        (call("fail", text="exit"), "error: SystemExit: 3\n", ["tool_error"]),
        (call("fail", text="memory"), "error: MemoryError: \n", ["tool_error"]),
        (call("fail", text="killed"), "error: the tool's process died, such as at the limit", ["tool_error"]),
        (call("fail", text="parent killed"), "error: the process for tools died\n", ["tool_error"]),
        (call("fail", text="hang"), "error: no result within 1 s\n", ["tool_timeout"]),
        (call("fail", text="fork"), "error: no result within 1 s\n", ["tool_timeout"]),
        (call("echo", text="a", times=10**7), f"{'a' * 50}\nerror: cut after 50 of 10000000 char", ["tool_output"]),
        (call("calculator", expression="1/0"), "error: ZeroDivisionError: division by zero\n", ["tool_error"]),
        (call("calculator", expression="open('x')"), "error: ValueError: write numbers with", ["tool_error"]),
        (call("search", text="a"), "error: the tools are echo, fail, calculator\n", ["unknown_tool"]),
        (call("echo"), "error: missing a required argument: 'text'\n", ["malformed_call"]),
        (call("echo", text="a", times="b"), "error: TypeError: can't multiply sequence", ["tool_error"]),
        (
            call("echo", text="a", color="red"),
            "error: got an unexpected keyword argument",
            ["malformed_call"],
        ),
        ("<tool_call>echo a</tool_call>", 'error: write <tool_call>{"name": ..., "argum', ["malformed_call"]),
        ('<tool_call>{"name": "echo"', "error: write", ["malformed_call"]),
        ("<tool_call>" + "[" * 10**5, "error: write", ["malformed_call"]),
    ],
)
def test_a_call_has_its_result_or_a_message(tools: ToolEnvironment, text: str, message: str, faults: list[str]) -> None:
    """A fault is a short message with its kind, and the next call runs as if there had been none."""
    reply = tools.reset({}).step(text)
    assert reply.message.startswith(message) and len(reply.message) < 200
    assert (reply.is_done, reply.role, [*reply.faults]) == (False, "tool", faults)
    assert tools.step(call("echo", text="still here")).message == "still here\n"


def test_a_turn_without_a_call_ends_the_conversation(tools: ToolEnvironment) -> None:
    """Its reply has no message, and a call in the other notation is text."""
    assert tools.step("the answer is [echo 4]").is_done
    other = attrs.evolve(cast("Any", tools), calls="brackets")
    with closing(other):
        other.open()
        assert other.step(call("echo", text="a").replace("[", "")).is_done
        reply = other.step("see [echo a b] and [echo [x]")
        assert reply.message == "a b\n[x\n" and not reply.is_done
        assert other.step("[echo").faults == ["malformed_call"]


def test_tools_that_cannot_be_imported_again_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the names of the tools and the reason."""
    (tmp_path / "broken.py").write_text("import nothing_of_this_name", "utf-8")
    monkeypatch.setattr("drawloom.components.environments.tools.getfile", lambda _: str(tmp_path / "broken.py"))
    text = "the tools echo can't be imported again: ModuleNotFoundError: No module named 'nothing_of_this_name'"
    with closing(open_tools(echo())) as environment, pytest.raises(UserError, match=text):
        environment.step(call("echo", text="a"))


def test_tools_that_break_during_a_run_are_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a process has imported the tools, a file that can't be imported any more is an error for the model."""
    with closing(open_tools(echo(), fail(), processes=1)) as environment:
        assert environment.step(call("fail", text="parent killed")).faults == ["tool_error"]
        (tmp_path / "broken.py").write_text("1 +", "utf-8")
        monkeypatch.setattr("drawloom.components.environments.tools.getfile", lambda _: str(tmp_path / "broken.py"))
        reply = environment.step(call("echo", text="a"))
        assert reply.faults == ["tool_error"] and "echo, fail can't be imported again: SyntaxError" in reply.message


def test_a_tool_ends_with_the_process_that_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the run is killed its pipe closes, and neither the process for tools nor a running tool is left."""
    monkeypatch.chdir(tmp_path)
    process = JsonProcess(tool_process.__file__)
    process.ask({"path": sys.path, "tools": {"fail": faulty_tools.__file__}}, 60)
    limits = {"seconds": 60.0, "bytes": 10**9, "characters": 9}
    process._pipe.send_bytes(json.dumps({"tool": "fail", "arguments": {"text": "waits"}, **limits}).encode())
    while not (tmp_path / "waiting").exists() or not (tmp_path / "waiting").read_text("utf-8"):
        time.sleep(0.01)
    tool = int((tmp_path / "waiting").read_text("utf-8"))
    process._pipe.close()
    assert process._process.wait(20) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(tool, signal.SIGCONT)
