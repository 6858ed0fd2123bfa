"""Every command with `--format json`."""

import contextlib
import io
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import pytest

from drawloom.graph.cli.main import find_command_files, main
from drawloom.graph.cli.schemas import read_result_schema
from drawloom.graph.project import Project
from support.processes import run_ranks
from support.run_folders import write_run

SERVERS = {"lsp", "mcp"}
"""Commands whose standard output is a protocol."""

RUN = "runs/tiny"
COMMANDS: dict[str, tuple[list[str], int]] = {
    "ask": (["--than", "tiny.toml", "--edit=optimizer.lr=1", "--budget", "1steps"], 2),
    "check": (["tiny.toml", "optimizer.lrr=1"], 2),
    "run": (["tiny.toml", "trainer.steps=4"], 0),
    "runs": (["runs"], 0),
    "explain": (["tiny.toml", "optimizer.lr"], 0),
    "show": (["tiny.toml"], 0),
    "draw": (["tiny.toml", "--step"], 0),
    "diff": (["first_run", "tiny.toml"], 0),
    "schema": (["--result", "runs"], 0),
    "list": (["optim"], 0),
    "compare": (["runs", "alike"], 0),
    "data": (["show", "tiny.toml", "--row", "0"], 0),
    "embed": ([RUN, "corpus/part0.py", "--to", "embeddings.safetensors"], 0),
    "evaluate": ([RUN], 0),
    "export": ([RUN, "--to", "exported"], 0),
    "generate": ([RUN, "--prompt", "def ", "--tokens", "4", "--temperature", "0"], 0),
    "lm-eval": ([RUN, "--tasks", "no_such_task"], 2 if find_spec("lm_eval") else 1),
    "ladder": (["tiny.toml"], 2),
    "import": (["lora.yml"], 0),
    "lr": (["tiny.toml"], 0),
    "new": (["mine"], 0),
    "plan": ([RUN, "--device", "cpu", "--mtbf", "24", "--floor"], 0),
    "precision": (["tiny.toml", "model.head_dim=16", "--steps", "0"], 0),
    "reference-logps": (["tiny.toml", "--to", "logps.jsonl"], 2),
    "report": ([RUN], 0),
    "schedule": (["gpipe", "--ranks", "2", "--microbatches", "3", "--costs", "unshard=1"], 0),
    "score": ([RUN, "corpus/part0.py", "--to", "scores.jsonl"], 2),
    "teacher-logps": (["tiny.toml", "--to", "teacher", "--top-k", "2"], 0),
    "sweep": (["tiny.toml", "optimizer.lr=1e-3,3e-4", "--dry-run"], 0),
    "tokenize": (["corpus", "--to", "store", "--workers", "1"], 0),
    "verify": ([RUN], 0),
    "why": ([RUN, "alike/other", "--recorded"], 0),
}
SLOW: dict[str, tuple[list[str], int]] = {  # they start processes of their own
    "launch": (["--nproc-per-node", "1", "check", "tiny.toml"], 0),
    "prove": (["loss.next_token", "--budget", "1s"], 0),
    "verify-resume": (["tiny.toml", "--steps", "80"], 0),
}


@attrs.frozen
class Answer:
    """Exit code and standard output of a command."""

    code: int
    text: str


def answer(folder: Path, commands: Sequence[list[str]]) -> list[Answer]:
    """Run commands one after another in this process; for `run_ranks`."""
    os.chdir(folder)
    write_run(folder / "alike/other")
    Path("lora.yml").write_text("base_model: base\nadapter: lora\nlora_r: 4\n", "utf-8")
    answers = []
    for arguments in commands:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
            code = main(arguments)
        answers.append(Answer(code, out.getvalue()))
    return answers


def check_answers(folder: Path, commands: dict[str, tuple[list[str], int]]) -> dict[str, Any]:
    """Run commands, check their codes and their JSON against the schemas, and return the JSON by command."""
    words = [[name, *arguments, "--format", "json"] for name, (arguments, _) in commands.items()]
    words = [[name, "--format", "json", *rest[:-2]] if name == "launch" else [name, *rest] for name, *rest in words]
    [answers] = run_ranks(answer, 1, folder, words, timeout=300, variables=False)
    printed = {}
    for (name, (_, code)), given in zip(commands.items(), answers, strict=True):
        assert given.code == code, (name, given)
        printed[name] = json.loads(given.text, parse_constant=pytest.fail)
        jsonschema.validate(printed[name], read_result_schema(Project.from_package("drawloom"), name))
        assert (code == 0) or "error" in printed[name] or name == "check", name
    return printed


def test_every_command_prints_json_of_its_schema(folder: Path) -> None:
    """One JSON text alone is on stdout, also after a failure, and the schema admits no other key."""
    printed = check_answers(folder, COMMANDS)
    assert {*COMMANDS, *SLOW, *SERVERS} >= set(find_command_files(Project.from_package("drawloom")))
    assert [problem["code"] for problem in printed["check"]["problems"]] == ["DL302"]
    assert printed["run"]["outcome"]["run"] == {"folder": RUN}
    assert printed["run"]["outcome"]["trainer"] == {"step": 4, "steps": 4, "stop_reason": ""}
    assert [row["state"] for row in printed["runs"]["runs"]] == ["finished"]
    assert printed["verify"]["checkpoints"][-1]["path"] == f"{RUN}/checkpoints/step-4"
    assert printed["evaluate"]["unit"] == "tokens" and printed["evaluate"]["perplexity"] > 1
    assert len(printed["data"]["rows"][0]["tokens"]) == 32
    assert printed["lm-eval"]["error"]["exit_code"] == COMMANDS["lm-eval"][1]


def test_schemas_are_json_for_other_languages(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Python reads and writes Infinity, and editors refuse it: node or jq reads the schemas of recipes and commands."""
    parsers = {
        "node": ["-e", "process.argv.slice(1).forEach(path => JSON.parse(require('fs').readFileSync(path)))"],
        "jq": ["empty"],
    }
    if not (parser := next(filter(shutil.which, parsers), None)):
        pytest.skip("needs node or jq")
    words = [[], *(["--result", name] for name in find_command_files(Project.from_package("drawloom")))]
    for number, extra in enumerate(words):
        main(["schema", *extra])
        (tmp_path / f"{number}.json").write_text(capfd.readouterr().out or "{}", "utf-8")
        main(["schema", *extra, "--format", "json"])
        (tmp_path / f"{number}_as_data.json").write_text(capfd.readouterr().out, "utf-8")
    command = [parser, *parsers[parser], *map(str, sorted(tmp_path.glob("*.json")))]
    read = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert not read.returncode, read.stderr[-500:]
    assert 'exclusiveMaximum": 1' in (tmp_path / "0.json").read_text("utf-8")


@pytest.mark.soak  # they start processes of their own
def test_commands_that_start_processes_print_json_too(folder: Path) -> None:
    """The processes print on stderr."""
    printed = check_answers(folder, SLOW)
    assert printed["launch"]["code"] == 0 and printed["verify-resume"]["difference"] == ""


def test_a_schema_refuses_other_keys() -> None:
    """A result with a key more or less, or a value of another type, is not valid."""
    schema = read_result_schema(Project.from_package("drawloom"), "export")
    jsonschema.validate({"folder": "f", "step": 1}, schema)
    cases: list[dict[str, Any]] = [{"folder": "f"}, {"folder": "f", "step": 1, "more": 0}]
    for wrong in [*cases, {"folder": "f", "step": "1"}, {"error": {}}]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
