"""Conversations with environments of the package `verifiers`, or of a stand-in for it."""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.environments.verifiers import VerifiersEnvironment
from drawloom.graph import UserError
from drawloom.ports import Environment, Examples
from drawloom.testing import check_port
from support.runs import drawloom
from support.verifiers_package import PACKAGES, STAND_IN, importable

SECONDS = 4


@pytest.fixture(scope="module", params=PACKAGES)
def package(request: pytest.FixtureRequest) -> Iterator[str]:
    with importable(request.param):
        yield request.param


@pytest.fixture(scope="module")
def adder(package: str) -> Iterator[VerifiersEnvironment]:
    with closing(VerifiersEnvironment(environment="adder", seconds=SECONDS)) as environment:
        environment.check_before_open()
        yield environment


def call(a: int, b: int, name: str = "add") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'a': a, 'b': b}})}</tool_call>"


def example(**info: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4", "info": info}


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_tools_answer_turns_and_the_rubric_scores_the_end(adder: VerifiersEnvironment) -> None:
    """
    Each call of a turn has its result in one message, and the reward is the weighted sum over the conversation.

    The second reward function is asynchronous.
    """
    (schema,) = adder.tool_schemas
    assert (schema["type"], schema["function"]["name"]) == ("function", "add")
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    episode = adder.reset(example())
    reply = episode.step(f"first {call(2, 2)} then {call(3, 4)}")
    assert (reply.message, reply.role, reply.is_done, reply.reward) == ("4\n7", "tool", False, None)
    reply = episode.step("4")
    assert (reply.message, reply.is_done, reply.reward) == ("", True, 2.0 * 1 + 0.5 * 2)
    wrong = adder.reset(example()).step("5")
    assert (wrong.is_done, wrong.reward) == (True, 0.5)


def test_faulty_calls_are_counted_and_answered(adder: VerifiersEnvironment) -> None:
    """An unreadable call has the environment's message and is a fault; an unknown tool has the message alone."""
    episode = adder.reset(example())
    reply = episode.step("<tool_call>add 2</tool_call>")
    assert ([*reply.faults], reply.role, reply.is_done) == (["malformed_call"], "tool", False) and reply.message
    reply = episode.step(call(2, 2, "subtract") + call(2, 2))
    assert not reply.faults and reply.message == "'subtract'\n4"


def test_the_environment_ends_a_conversation_at_its_own_number_of_turns(adder: VerifiersEnvironment) -> None:
    """The fourth turn is the last, even with a call, and has the rubric's reward."""
    episode = adder.reset(example())
    replies = [episode.step(call(2, 2)) for _ in range(4)]
    assert [reply.is_done for reply in replies] == [False] * 3 + [True]
    assert replies[-1].reward == 0.5 * 4


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raise", "LookupError: no such page"),
        ("exit", "SystemExit: 3"),
        ("killed", "the environment's process died"),
        ("group killed", "the environment's process died"),
        ("hang", "the environment's process died"),
        ("parent killed", "LookupError: no parent"),
        ("rewrite", "it does something else than to add texts of one role after a turn"),
        ("roles", "it does something else than to add texts of one role after a turn"),
        ("silent", "the environment adds no message after a turn"),
        ("image", "it does something else than to add texts of one role after a turn"),
    ],
)
def test_a_fault_ends_its_conversation_alone(adder: VerifiersEnvironment, fault: str, text: str) -> None:
    """An exception has the fault's text; other conversations, begun before and after, go on."""
    other, episode = adder.reset(example()), adder.reset(example(fault=fault))
    other.step(call(2, 2))
    with pytest.raises(RuntimeError, match=text):
        episode.step(call(2, 2))
    assert other.step("4").reward == 3.0
    end = time.monotonic() + 60
    while True:  # after the death of its process, the next conversation may meet the closing pipe
        try:
            assert adder.reset(example()).step("4").reward == 2.5
            return
        except (EOFError, RuntimeError):
            assert fault == "parent killed" and time.monotonic() < end


def test_processes_of_an_environment_end_with_its_conversation(adder: VerifiersEnvironment, tmp_path: Path) -> None:
    """A process in the background neither outlives the environment's exit, nor keeps the conversation waiting."""
    note = tmp_path / "note"
    with pytest.raises(RuntimeError, match="the environment's process died"):
        adder.reset(example(fault="children", note=str(note))).step(call(2, 2))
    process, end = Path("/proc", note.read_text().strip(), "stat"), time.monotonic() + 60
    while process.exists() and process.read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)


def test_faults_at_the_beginning_and_of_the_rubric_are_no_rewards(adder: VerifiersEnvironment) -> None:
    """Additions to the prompt, and an error in a reward function, are exceptions, and not the reward 0."""
    with pytest.raises(RuntimeError, match="the environment adds to the prompt"):
        adder.reset(example(fault="prompt"))
    with pytest.raises(RuntimeError, match="is_correct: no judge"):
        adder.reset(example(fault="rubric")).step("4")
    assert math.isnan(adder.reset(example(fault="nan")).step("4").reward or 0.0)


def test_random_numbers_depend_on_the_example_alone(adder: VerifiersEnvironment) -> None:
    """Conversations about one example have the same numbers of Python and numpy, at every start; others have others."""
    first, again = (adder.reset(example(fault="random")).step(call(2, 2)) for _ in range(2))
    other = adder.reset(example(fault="random", seed=1)).step(call(2, 2))
    assert first == again and (first.role, first.is_done) == ("user", False)
    with closing(VerifiersEnvironment(environment="adder")) as restarted:
        assert restarted.reset(example(fault="random")).step(call(2, 2)) == first
    assert not {*first.message.split()} & {*other.message.split()}


def test_environment_cleans_up_after_a_cut_conversation(adder: VerifiersEnvironment, tmp_path: Path) -> None:
    """When nobody asks for more turns, the environment's cleanup runs."""
    note = tmp_path / "note"
    episode = adder.reset(example(note=str(note)))
    episode.step(call(2, 2))
    assert not note.exists()
    del episode
    wait_for(note)


def test_processes_end_with_the_run(package: str, tmp_path: Path) -> None:
    """When the run is killed its pipes close, and neither the loaded environment nor a conversation is left."""
    note = tmp_path / "note"
    environment = VerifiersEnvironment(environment="adder")
    episode = environment.reset(example(note=str(note)))
    episode.step(call(2, 2))
    environment._process._pipe.close()
    environment._process._process.wait(60)
    episode.pipe.close()
    wait_for(note)


def test_environment_keeps_the_contracts_of_its_ports(package: str) -> None:
    """Conversations are independent, and examples are the same at every start."""
    for port in (Environment, Examples):
        check_port(VerifiersEnvironment, port, environment="adder")


def test_data_are_examples(adder: VerifiersEnvironment, package: str) -> None:
    """Rows have prompts, answers and their origin; evaluation data are the validation split, if there are any."""
    rows = adder.examples("train")
    assert [row["answer"] for row in rows] == ["0", "2", "4"] and rows[1]["source"] == "adder, train 1"
    assert rows[2]["prompt"] == [{"role": "user", "content": "2+2="}]
    assert adder.reset(rows[2]).step("4").reward == 2.5
    assert [row["answer"] for row in adder.examples("validation")] == ["0", "2", "4"]
    with closing(VerifiersEnvironment(environment="adder", arguments={"evaluation_rows": 1, "rows": 2})) as other:
        assert [len(other.examples(split)) for split in ("train", "validation")] == [2, 1]


REFUSED = {
    "missing": ("", "adder2 can't be used: ModuleNotFoundError: No module named 'adder2'"),
    "exits": ("import os; os._exit(3)", "has died"),
    "raises": ("raise SystemExit('no licence')", "SystemExit: no licence"),
    "own loop": (
        "import verifiers as vf\n"
        "class Agent(vf.MultiTurnEnv):\n"
        "    async def get_prompt_messages(self, state): return []\n"
        "    async def env_response(self, messages, state): return []\n"
        "def load_environment():\n"
        "    from datasets import Dataset\n"
        "    data = Dataset.from_list([{'question': 'a', 'answer': 'b'}])\n"
        "    return Agent(dataset=data, rubric=vf.Rubric(funcs=[lambda answer: 1.0]))\n",
        "Agent chooses what the model reads; name a MultiTurnEnv that adds messages",
    ),
    "groups": (
        "import verifiers as vf\n"
        "def best(completions): return [0.0 for _ in completions]\n"
        "def load_environment():\n"
        "    from datasets import Dataset\n"
        "    data = Dataset.from_list([{'question': 'a', 'answer': 'b'}])\n"
        "    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[best]))\n",
        "its rubric compares answers to a prompt; give it reward functions of one completion",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_check_names_an_environment_that_cannot_be_used(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`check` has one problem, at the setting, with the reason."""
    monkeypatch.chdir(tmp_path)
    content, text = REFUSED[name]
    if content:
        (tmp_path / "adder2.py").write_text(content, "utf-8")
    with closing(VerifiersEnvironment(environment="adder2")) as environment, pytest.raises(UserError) as raised:
        environment.check_before_open()
    assert text in str(raised.value) and str(raised.value).startswith("environment: ")


RECIPE = """
extends = "grpo"
unset = ["examples"]
vars.base = "no"
rollout.rollouts = "@turns"
turns = { use = "rollouts.turns", sampler = "@rollouts" }
environment = { use = "environments.verifiers", environment = "adder2" }
"""


def check(folder: Path, path: Path | None, node: str = "environment") -> list[Any]:
    """Return the problems of a node in a recipe, with packages in another folder."""
    (folder / "bad.toml").write_text(RECIPE, "utf-8")
    (outcome,) = drawloom(folder, "check", "bad.toml", "--format", "json", path=str(path or ""))
    problems = json.loads(outcome.text)["problems"]
    return [problem for problem in problems if problem["node"] == node]


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="needs an installation without the package verifiers")
def test_check_names_the_package_and_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, and with a release whose environments are others, the remedy is the extra."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(STAND_IN)])
    (problem,) = check(tmp_path, None)
    assert "needs the package 'verifiers'" in problem["text"] and "drawloom[verifiers]" in json.dumps(problem)
    (tmp_path / "new/verifiers").mkdir(parents=True)
    (tmp_path / "new/verifiers/__init__.py").write_text("__version__ = '0.4.0'", "utf-8")
    (problem,) = check(tmp_path, tmp_path / "new")
    assert "verifiers 0.4.0 is not 0.2 or 0.3; pip install 'drawloom[verifiers]'" in problem["text"]
    (problem,) = check(tmp_path, STAND_IN)
    assert "No module named 'adder2'" in problem["text"] and problem["line"] == 7


def test_check_names_an_environment_without_data(tmp_path: Path) -> None:
    """An environment's empty data are a problem of the node that reads them, and the environment has none itself."""
    loaded = "import adder\ndef load_environment(): return adder.load_environment(rows=0)\n"
    (tmp_path / "adder2.py").write_text(loaded, "utf-8")
    with importable("stand-in"):
        path = Path(":".join(sys.path[:2]))
        assert not check(tmp_path, path)
        (problem,) = check(tmp_path, path, "packing")
    assert problem["text"].startswith("data: there is no example")
