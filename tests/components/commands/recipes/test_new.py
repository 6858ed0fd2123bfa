"""The command `new`."""

import re
import resource
from pathlib import Path

import pytest

from drawloom.graph.cli.main import main
from drawloom.graph.project import Recipe


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty current directory."""
    monkeypatch.chdir(tmp_path)


def _differences(name: str, base: str) -> list[str]:
    return [str(change) for change in Recipe.load(name).changes_since(Recipe.load(base))]


@pytest.mark.parametrize("base", ["first_run", "moe", "mine.toml"])
def test_a_new_recipe_is_its_base_with_or_without_its_comments(base: str) -> None:
    """The recipe has its own name; removing "# " from a line restores the base's value."""
    Path("mine.toml").write_text('extends = "first_run"\n[run]\nname = "first_run"\n[optimizer]\nlr = 1.0\n', "utf-8")
    assert main(["new", "other", "--from", base]) == 0
    text = Path("other.toml").read_text("utf-8")
    Path("all.toml").write_text(re.sub(r"^# (?=\[|\w+ = )", "", text, flags=re.MULTILINE), "utf-8")
    renamed = f'[run] name: "{"first_run" if base == "mine.toml" else base}" -> "other" (safe)'
    assert _differences("other.toml", base) == _differences("all.toml", base) == [renamed]
    assert text.count("\n# lr = ") == 1 and "base learning rate" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine"], "mine.toml exists; give the name of a new file"),
        (["no/mine"], "no file can be written in no (No such file or directory)"),
        (["mine2", "--from", "first"], "there is no recipe 'first'"),
        ([".mine"], "'.mine' is not a plain file name"),
    ],
)
def test_an_unwritable_file_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A file is never replaced, and no incomplete file remains."""
    Path("mine.toml").write_text("# mine\n", "utf-8")
    assert main(["new", *words]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["mine.toml"]
    assert Path("mine.toml").read_text("utf-8") == "# mine\n"


def test_half_of_a_recipe_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    """If a recipe can't be written to its end, the same command can be tried again."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        assert main(["new", "mine"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err == (
        "mine.toml: File too large; free space or write another folder, and repeat the command\n"
    )
    assert not list(Path().iterdir())
