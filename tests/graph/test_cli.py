"""The command line."""

import pytest

from drawloom.graph.cli import main, split_words
from drawloom.graph.overrides import read_overrides
from drawloom.graph.problems import RecipeError
from drawloom.graph.workshop import Workshop


def test_three_ways_to_set_a_value() -> None:
    """node.key=value, --node.key=value and --node.key value are told from what argparse reads, wherever they stand."""
    rest, words = split_words(["check", "--a.b", "1", "small", "c.d=x y", "--e.f=[1, 2]", "--overlay", "o.toml"])
    assert rest == ["check", "small", "--overlay", "o.toml"]
    assert read_overrides(words) == {"a": {"b": 1}, "c": {"d": "x y"}, "e": {"f": [1, 2]}}


@pytest.mark.parametrize(
    ("word", "value"),
    [("a.b=1", 1), ("a.b=1e-3", 1e-3), ("a.b=eager", "eager"), ('a.b="1"', "1"), ("a.b=true", True), ("a.b=", "")],
)
def test_a_value_that_is_not_toml_is_a_string(word: str, value: object) -> None:
    """What TOML can read it reads; the rest is text."""
    assert read_overrides([word]) == {"a": {"b": value}}


@pytest.mark.parametrize("word", ["a=1", "a..b=1", "--a.b"])
def test_what_is_no_override_is_refused(word: str) -> None:
    """A word that sets nothing is a problem."""
    with pytest.raises(RecipeError, match="not understood"):
        read_overrides([word])


def test_run_runs_the_root(workshop: Workshop) -> None:
    """A fine recipe runs, with exit code 0."""
    assert main(["run", "small"], workshop) == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["check", "small"], 0),
        (["check", "small", "page.title=3"], 2),
        (["check", "smal"], 2),
        (["run", "small", "page.tittle=x"], 2),
        (["explain", "small", "nobody"], 2),
        (["list", "nothing"], 2),
    ],
)
def test_exit_codes(workshop: Workshop, arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """0 is fine, 2 is a faulty recipe or command line, with a sentence and no traceback."""
    assert main(arguments, workshop) == code
    err = capsys.readouterr().err
    assert bool(err) == (code != 0) and "Traceback" not in err


@pytest.mark.parametrize("arguments", [["check"], ["fly"], ["check", "small", "--fast"], ["check", "small", "more"]])
def test_what_is_not_recognised_is_refused(workshop: Workshop, arguments: list[str]) -> None:
    """Words and flags that no command knows end with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        main(arguments, workshop)
    assert caught.value.code == 2


def test_show_can_be_checked_again(workshop: Workshop, tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    """What `show` prints is a recipe with the same resolved form."""
    main(["show", "small"], workshop)
    text = capsys.readouterr().out
    path = f"{tmp_path}/shown.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    main(["show", path], workshop)
    assert capsys.readouterr().out == text


def test_explain_says_where_a_value_came_from(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """The stack of a value goes from the command line through the file and its variable."""
    main(["explain", "small", "page.title", "page.title=Kiosk"], workshop)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == '[page] title = "Kiosk"  (command line)'
    assert lines[2].startswith('"Kiosk"') and lines[3].startswith('"$vars.title"') and lines[4].startswith('"Shop"')


def test_explain_says_why_nodes_are_connected(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """An edge that was found by type is told apart from one that was written."""
    main(["explain", "small", "page"], workshop)
    out = capsys.readouterr().out
    assert "store -> [store]  (the only Store)" in out and "used by [trainer]" in out


def test_draw_and_list_show_what_there_is(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """The tree has every node of the run; the list every component, and settings with types and defaults."""
    main(["draw", "small"], workshop)
    assert capsys.readouterr().out.splitlines() == [
        "[trainer] servers.loop",
        "├── pages: [page] pages.plain",
        "│   └── store: [store] stores.memory",
        "└── store: [store] stores.memory",
    ]
    main(["list"], workshop)
    assert "stores.disk" in capsys.readouterr().out
    main(["list", "stores.memory"], workshop)
    assert "size: integer = 10  (how many values it keeps)" in capsys.readouterr().out
