"""Every code block of README and docs works as its page shows, or states why it cannot run here."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml

from drawloom import Recipe
from support.blocks import (
    ROOT,
    Block,
    Command,
    blocks,
    commands,
    run_source,
    run_words,
    shorten,
    split_redirection,
    write_recipes,
)
from support.chat import tokenizer_folder
from support.observers_of_runs import TINY
from support.processes import run_ranks
from support.runs import Outcome

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
SLOW = {
    *("commands", "components", "data", "families", "finetuning", "schedules"),
    *("distillation", "experiments", "plan", "pretraining", "recipes"),
    *("evaluation", "gpus", "memory", "optimizers", "preferences", "report", "reward_models", "speed", "trackers"),
}
"""Pages with minutes of programs between them, which `make soak` runs."""

SHELL = {"cat", "cd", "cp", "head", "ls", "mkdir", "printf", "unzip"}
HERE = "PYTHONPATH=. "
TARGET = re.compile(r"^(?P<name>[\w-]+):.*\n(?:\t.*\n)*", re.MULTILINE)
POSITION = re.compile(r"^\S+\.toml:\d+:\d+: ")
NUMBER = re.compile(r"\d[\d,.:]*(e-?\d+)?( ([kMGT]?i?B|bytes)\b)?")


@pytest.fixture(scope="session")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write small versions of the shipped recipes, and return their folder."""
    folder = tmp_path_factory.mktemp("small") / "recipes"
    write_recipes(folder)
    return folder


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.soak] * (page.stem in SLOW)) for page in PAGES],
    ids=[str(page.relative_to(ROOT)) for page in PAGES],
)
def test_every_block_of_a_page_works(page: Path, recipes: Path, base: Path, tmp_path: Path) -> None:
    """A page's blocks work in order: recipes are valid, programs run, and commands print the shown output."""
    prepare(tmp_path)
    if "path/to/folder" in page.read_text("utf-8"):
        for name in ("path/to/folder", "runs/first_run/export"):
            shutil.copytree(base, tmp_path / name)
    for block in blocks(page):
        CHECKS[block.language](Reader(tmp_path, recipes), block)


def test_every_block_has_a_known_language() -> None:
    """Blocks without code are marked as text, so that no code stays untested."""
    assert [str(block) for page in PAGES for block in blocks(page) if block.language not in CHECKS] == []


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a tiny model whose tokenizer has a chat template, and return its folder."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = {"use": "data.hugging_face_tokenizer", "path": str(tokenizer_folder(folder / "tokenizer"))}
    values: dict[str, Any] = {"model": TINY, "run": {"name": "base", "folder": str(folder / "run")}}
    with Recipe.load("first_run").with_values(values | {"tokenizer": tokenizer}).open(only="export") as objects:
        objects["export"].run_after_training(1)
    return folder / "run" / "export"


def prepare(folder: Path) -> None:
    """Create a reader's files: texts, a recipe, conversations and preferences."""
    for number in range(6):
        (folder / "corpus" / f"{number % 2}").mkdir(parents=True, exist_ok=True)
        text = f"Chapter {number}. " + f"It was the weaver who drew {number} threads, and the pattern that chose. " * 12
        (folder / "corpus" / f"{number % 2}" / f"{number}.txt").write_text(text, "utf-8")
    shutil.copytree(folder / "corpus" / "0", folder / "books")
    (folder / "mine.toml").write_text('extends = "first_run"\nrun.name = "mine"\n', "utf-8")
    shutil.copytree(ROOT / "docs/examples", folder / "docs/examples")
    shutil.copy(ROOT / "docs/examples/conversations.jsonl", folder / "mine.jsonl")
    shutil.copy(ROOT / "docs/examples/preferences.jsonl", folder / "pairs.jsonl")
    shutil.copy(ROOT / "docs/examples/feedback.jsonl", folder / "feedback.jsonl")


class Reader:
    """A reader who runs blocks in a folder, with small recipes."""

    def __init__(self, folder: Path, recipes: Path) -> None:
        self.folder, self.recipes = folder, recipes

    def toml(self, block: Block) -> None:
        """Write a titled file, or check a recipe or a part of one over first_run."""
        data = tomli.loads(block.text)
        if block.kind == "from":
            check_excerpt(block)
        elif block.title:
            assert any(block.title in later.text for later in blocks(block.page) if later.line > block.line), block
            self._write(block, shorten(block.text))
        elif block.kind != "not run":
            (self.folder / "part.toml").write_text(shorten(block.text), "utf-8")
            whole = ["part.toml"] if "extends" in data else ["first_run", "--overlay", "part.toml"]
            outcome = self._run(Command(shlex.join(["drawloom", "check", "--elsewhere", *whole]), []))
            assert outcome.code == 0, f"{block}\n{outcome.text}"

    def python(self, block: Block) -> None:
        """Write a titled file, or run the code and its test functions."""
        if block.kind == "from":
            check_excerpt(block)
        elif block.title:
            compile(block.text, str(block), "exec")
            self._write(block, block.text)
        elif block.kind != "not run":
            run_ranks(run_source, 1, self.folder, block.text, self.recipes, timeout=120, variables=False)

    def console(self, block: Block) -> None:
        """Run commands, and check the exit code and the shown lines, ignoring numbers."""
        if block.kind == "not run":
            return
        for command in commands(block):
            outcome = self._run(command)
            assert outcome.code == int(block.value if block.kind == "exit" else 0), (
                f"{block} {command.words}\n{outcome}"
            )
            missing = find_unprinted(command.shown, outcome.text)
            assert not missing, f"{block} {command.words}: {missing!r} is not printed in\n{outcome.text}"

    def bash(self, block: Block) -> None:
        """Check the syntax of a cluster script without running it."""
        assert block.kind == "not run", f"{block}: write a console block, or say why it is not run"
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)

    def yaml(self, block: Block) -> None:
        """Parse a configuration of another program, and write it if it has a title."""
        if block.title:
            (self.folder / block.title).write_text(block.text, "utf-8")
        assert block.title or block.kind == "not run", f"{block}: say why it is not run"
        list(yaml.safe_load_all(block.text))

    def lua(self, block: Block) -> None:
        """Accept an editor's configuration without running it."""
        assert block.kind == "not run", f"{block}: say why it is not run"

    def text(self, block: Block) -> None:
        """Accept a diagram."""

    def _run(self, command: Command) -> Outcome:
        path = str(self.folder) if command.words.startswith(HERE) else ""
        words, target = split_redirection(command.words.removeprefix(HERE))
        if words[0] == "make":
            words = find_make_command(words[1])
            if words[0] != "drawloom":
                return Outcome(0, "")
        ranks = 1
        if words[:2] == ["drawloom", "launch"]:
            ranks, words = int(words[3]), ["drawloom", *words[4:]]
        if words[0] in ("drawloom", "python", "pytest"):
            arguments = self.folder, words, self.recipes, path
            outcome: Outcome = run_ranks(run_words, ranks, *arguments, timeout=120, variables=ranks > 1)[0]
        else:
            assert words[0] in SHELL, f"{command.words}: not known to be harmless"
            done = subprocess.run(command.words, shell=True, cwd=self.folder, capture_output=True, text=True)
            outcome = Outcome(done.returncode, done.stdout + done.stderr)
        if target:
            (self.folder / target).write_text(outcome.text, "utf-8")
        return outcome

    def _write(self, block: Block, text: str) -> None:
        path = self.folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


CHECKS: dict[str, Callable[[Reader, Block], None]] = {
    name: getattr(Reader, name) for name in ("toml", "python", "console", "bash", "yaml", "lua", "text")
} | {"json": Reader.yaml}  # JSON is YAML


def check_excerpt(block: Block) -> None:
    """Check that an excerpt has only lines of its file, in order; `...` stands for omitted lines."""
    lines = iter((ROOT / block.value).read_text("utf-8").splitlines())
    for line in block.text.splitlines():
        assert not line or line.strip() == "..." or line in lines, f"{block}: {block.value} does not have\n{line}"


def find_make_command(target: str) -> list[str]:
    """Return the last command of a Makefile target."""
    targets = {match["name"]: match[0] for match in TARGET.finditer((ROOT / "Makefile").read_text("utf-8"))}
    return targets[target].splitlines()[-1].strip().removeprefix("$(BIN)/").split()


def find_unprinted(shown: list[str], printed: str) -> str:
    """Return the first shown line that is not printed in order, ignoring numbers, or an empty string."""
    lines = iter([normalize(line) for line in printed.splitlines()])
    free = False
    for line in shown:
        if line.strip() == "..." or (free and not line.startswith("trained")):
            continue
        free = line == "a sample:"  # a model's text varies
        if normalize(line) not in lines:
            return line
    return ""


def normalize(line: str) -> str:
    """Return a line with single spaces and without numbers and byte units, or a problem's line unchanged."""
    if POSITION.match(line):
        return line
    return " ".join(NUMBER.sub("#", line.partition("  # ")[0]).split())
