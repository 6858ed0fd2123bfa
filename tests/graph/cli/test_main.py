"""The command line."""

import errno
import json
import re
import sys
import weakref
from pathlib import Path

import pytest
import tomli

import drawloom
from drawloom.graph.cli.command import Console
from drawloom.graph.cli.main import find_command_files, main, split_off_overrides
from drawloom.graph.problems import RecipeError, ReopenError
from drawloom.graph.project import Project, Recipe
from drawloom.graph.recipe.overrides import read_overrides
from drawloom.graph.runtime.container import Container


def test_three_ways_to_set_a_value() -> None:
    """node.key=value, --node.key=value and --node.key value are separated from the arguments of argparse."""
    rest, words = split_off_overrides(
        ["check", "--a.b", "1", "small", "c.d=x y", "--e.f=[1, 2]", "--overlay", "o.toml"]
    )
    assert rest == ["check", "small", "--overlay", "o.toml"]
    assert read_overrides(words) == {"a": {"b": 1}, "c": {"d": "x y"}, "e": {"f": [1, 2]}}


@pytest.mark.parametrize("quote", ["", '"', "'"])
def test_a_node_name_in_a_key_may_be_in_quotes(quote: str) -> None:
    """A key that a file writes in quotes is the same key on the command line."""
    word = f"edit.a.list.after.{quote}@b.c{quote}=@d"
    assert split_off_overrides(["check", word]) == (["check"], [word])
    assert read_overrides([word]) == {"edit": {"a": {"list": {"after": {"@b.c": "@d"}}}}}


@pytest.mark.parametrize(
    ("word", "value"),
    [("a.b=1", 1), ("a.b=1e-3", 1e-3), ("a.b=eager", "eager"), ('a.b="1"', "1"), ("a.b=true", True), ("a.b=", "")],
)
def test_a_value_that_is_not_toml_is_a_string(word: str, value: object) -> None:
    """A value that TOML can read is parsed; any other value is a string."""
    assert read_overrides([word]) == {"a": {"b": value}}


@pytest.mark.parametrize("word", ["a=1", "a..b=1", "--a.b"])
def test_a_malformed_override_is_refused(word: str) -> None:
    """A word that sets nothing is a problem."""
    with pytest.raises(RecipeError, match="is not an override"):
        read_overrides([word])


def test_run_runs_the_root(project: Project) -> None:
    """A fine recipe runs, with exit code 0."""
    assert main(["run", "small"], project) == 0


def test_run_opens_the_graph_again_on_request(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values that nodes hand over reach the next container, until a run ends without a request."""
    seen: list[object] = []

    def enter(container: Container) -> Container:
        seen.append(container.handed_over)
        if len(seen) < 3:
            request = ReopenError("again")
            request.handed_over = {"page": len(seen)}
            raise request
        container.handed_over = {}
        return original(container)

    original = Container.__enter__
    monkeypatch.setattr(Container, "__enter__", enter)
    assert main(["run", "small"], project) == 0
    assert seen == [{}, {"page": 1}, {"page": 2}]


def test_a_closed_graph_is_freed_before_the_next_one_opens(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes a cycle that another one refers to from outside of Python, as autograd's nodes refer to modules."""

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    def enter(container: Container) -> Container:
        seen.append([cycle() for cycle in cycles])
        if len(seen) == 1:
            outer, inner = Cycle(), Cycle()
            weakref.finalize(outer, id, inner)  # a strong reference outside of both, until `outer` is freed
            cycles.extend([weakref.ref(outer), weakref.ref(inner)])
            raise ReopenError("again")
        return original(container)

    seen: list[list[object]] = []
    cycles: list[weakref.ref[Cycle]] = []
    original = Container.__enter__
    monkeypatch.setattr(Container, "__enter__", enter)
    assert main(["run", "small"], project) == 0
    assert seen == [[], [None, None]]


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
def test_commands_exit_with_0_or_2(
    project: Project, arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Success exits with 0; a faulty recipe or command line exits with 2 and a message without a traceback."""
    assert main(arguments, project) == code
    err = capsys.readouterr().err
    assert bool(err) == (code != 0) and "Traceback" not in err


@pytest.mark.parametrize("arguments", [["check"], ["fly"], ["check", "small", "--fast"], ["check", "small", "more"]])
def test_an_unrecognized_argument_is_refused(
    project: Project, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown words and flags exit with 2 and print the command's usage."""
    assert main(arguments, project) == 2
    assert capsys.readouterr().err.startswith("usage: drawloom ")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["chek", "small"], "there is no command 'chek'; did you mean 'check'?"),
        (
            ["check", "small", "title=Kiosk"],
            "unrecognized arguments: title=Kiosk; set values with node.key=value, such as trainer.steps=10",
        ),
        (["check", "small", "page.title", "=", "Kiosk"], "write page.title=Kiosk, without spaces"),
    ],
)
def test_typing_errors_get_a_suggestion(
    project: Project, arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt command, and spaces around the `=` of a value, get a suggestion."""
    assert main(arguments, project) == 2
    assert capsys.readouterr().err.endswith(f"error: {hint}\n")


@pytest.mark.parametrize("arguments", [["fly"], ["check", "nowhere"], ["check", "small", "page.title=3"], ["fault"]])
@pytest.mark.parametrize("is_first", [True, False])
def test_only_the_first_process_prints_a_failure(
    project: Project,
    arguments: list[str],
    is_first: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other processes exit with the same code and print nothing, not even a traceback."""
    console = Console(warns=False, is_first=lambda _: is_first)
    if arguments == ["fault"]:
        arguments = ["check", "small"]
        monkeypatch.setattr(Project, "load", lambda *_: 1 / 0)
        if is_first:
            with pytest.raises(ZeroDivisionError):
                main(arguments, project, console)
            return
    code = main(arguments, project, console)
    assert code == main(arguments, project, Console(is_first=lambda _: False)) != 0
    assert bool(capsys.readouterr().err) == is_first


@pytest.mark.parametrize("warns", [True, False])
def test_only_one_process_prints_warnings(project: Project, warns: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """One process prints a warning that all processes have."""
    assert main(["check", "small", 'spare.use="pages.plain"', "spare.title=A"], project, Console(warns)) == 0
    assert ("warning" in capsys.readouterr().err) == warns


def test_show_can_be_checked_again(project: Project, tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of `show` is a recipe with the same resolved form, except for comments about origins."""
    main(["show", "small"], project)
    text = capsys.readouterr().out
    path = f"{tmp_path}/shown.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    main(["show", path], project)
    again = capsys.readouterr().out
    assert tomli.loads(again) == tomli.loads(text) and "shown.toml" in again


def test_explain_accepts_a_key_or_no_target(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """`explain` works with and without a target, and includes values from the command line."""
    main(["explain", "small", "page.title", "page.title=Kiosk"], project)
    assert capsys.readouterr().out.startswith('[page] title = "Kiosk"  (string; command line)')
    main(["explain", "small"], project)
    assert "[store] stores.memory: Keeps values in memory." in capsys.readouterr().out


def test_diff_applies_values_to_the_second_recipe(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe is compared with itself plus the values of the command line."""
    assert main(["diff", "small", "small", "store.size=11"], project) == 0
    assert capsys.readouterr().out == "[store] size: 10 -> 11 (safe)\n"
    main(["diff", "small", "small"], project)
    assert capsys.readouterr().out == "no differences\n"


def test_diff_accepts_run_folders(project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`diff` reads the resolved recipe in a run folder."""
    main(["show", "small"], project)
    (tmp_path / "recipe.lock.toml").write_text(capsys.readouterr().out, "utf-8")
    main(["diff", str(tmp_path), "small", 'page.title="Kiosk"'], project)
    assert capsys.readouterr().out == '[page] title: "Shop" -> "Kiosk" (changes_training)\n'


def test_schema_is_json(project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`schema` prints JSON or writes it to a file."""
    main(["schema"], project)
    text = capsys.readouterr().out
    main(["schema", "--output", str(tmp_path / "schema.json")], project)
    assert (tmp_path / "schema.json").read_text("utf-8") == text
    assert "stores.memory" in json.loads(text)["definitions"]


def test_a_schema_that_cannot_be_written_is_an_error(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the option and the path; there is no traceback."""
    target = tmp_path / "none" / "schema.json"
    assert main(["schema", "--output", str(target)], project) == 1
    assert capsys.readouterr().err == (
        f"--output {target}: No such file or directory; name a file in a writable folder\n"
    )


def test_draw_and_list_print_nodes_and_components(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The tree has every node of the run, and the list has components, and settings with types and defaults."""
    main(["draw", "small"], project)
    assert capsys.readouterr().out.splitlines() == [
        "[trainer] servers.loop",
        "├── pages: [page] pages.plain",
        "│   └── store: [store] stores.memory",
        "└── store: [store] stores.memory",
    ]
    main(["list"], project)
    assert "stores.disk" in capsys.readouterr().out
    main(["list", "stores.memory"], project)
    assert "size: integer = 10  (how many values it keeps)" in capsys.readouterr().out
    main(["list", "stores.odd"], project)  # whose default TOML does not have
    assert "number: complex = 1j  (no number of TOML)" in capsys.readouterr().out


def test_components_are_listed_by_the_node_that_they_fit(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """`list --fits NODE` lists the components that implement the ports of all edges to the node."""
    main(["list", "--fits", "store"], project)
    fitting = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert "stores.memory" in fitting and "stores.disk" in fitting
    assert not [use for use in fitting if not use.startswith("stores.")]
    assert main(["list", "--fits", "stor"], project) == 2
    assert (
        capsys.readouterr().err
        == "no shipped recipe has a node [stor], and there is no such port; did you mean 'store'?\n"
    )


def test_components_are_listed_by_the_port_that_they_implement(capsys: pytest.CaptureFixture[str]) -> None:
    """`list --fits PORT` lists a port's components, and `--ports` lists all ports with their components."""
    assert main(["list", "--fits", "Tokenizer"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == ["data.bytes", "data.hugging_face_tokenizer"]
    assert main(["list", "--ports"]) == 0
    blocks = [block.splitlines() for block in capsys.readouterr().out.split("\n\n")]
    components = {block[0].partition(":")[0]: [line.strip() for line in block[1:]] for block in blocks}
    assert components["Tokenizer"] == listed and components["ChatTokenizer"] == listed[1:]
    assert list(components) == sorted(components) and {"Model", "Mesh"} <= components.keys()
    assert main(["list", "--fits", "Tokeniser"]) == 2
    assert "there is no such port; did you mean " in capsys.readouterr().err


def test_components_that_fit_a_sequence_change_the_same_values(capsys: pytest.CaptureFixture[str]) -> None:
    """Only phases that change gradients fit [clip], and every metric fits the group [metrics]."""
    main(["list", "--fits", "clip"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "gradients.clip_group_norm",
        "gradients.clip_norm",
        "gradients.clip_value",
    ]
    main(["list", "--fits", "metrics"])
    assert "metrics.perplexity" in capsys.readouterr().out


def test_check_prints_problems_as_json(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """`check --format json` prints every problem on stdout and exits like the text format."""
    assert main(["check", "small", "--format", "json", "page.title=3", "store.sise=4"], project) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["recipe"] == "small" and report["nodes"] == 3
    assert [(p["code"], p["node"], p["source"], p["line"]) for p in report["problems"]] == [
        ("DL302", "store", "command line", 0),
        ("DL303", "page", "command line", 0),
    ]
    assert main(["check", "small", "--format", "json"], project) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    assert main(["check", "smal", "--format", "json"], project) == 2
    assert [p["code"] for p in json.loads(capsys.readouterr().out)["problems"]] == ["DL101"]


def test_warnings_do_not_change_the_exit_code(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe with warnings alone exits with 0 in both formats."""
    words = ["spare.use=stores.memory", "page.store=@store", "trainer.store=@store"]
    assert main(["check", "small", *words], project) == 0
    assert "warning: [spare]" in capsys.readouterr().err
    assert main(["check", "small", "--format", "json", *words], project) == 0
    assert [p["warning"] for p in json.loads(capsys.readouterr().out)["problems"]] == [True]


def test_a_dry_run_prints_the_preview_once(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single process among several prints the preview, and none runs."""
    monkeypatch.setattr(Recipe, "preview", lambda _: "what would run")
    monkeypatch.setattr(Recipe, "open", lambda *_, **__: 1 / 0)
    assert main(["run", "small", "--dry-run"], project) == 0
    assert main(["run", "small", "--dry-run"], project, Console(warns=False)) == 0
    assert capsys.readouterr().out == "what would run\n"


def test_a_package_adds_a_command_by_a_file(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The shop's command is found by the name of its file, and is in its group in the help, as drawloom's are."""
    assert main(["count-nodes", "small"], project) == 0
    assert capsys.readouterr().out == "3 nodes\n"
    for own in (project, Project.from_package("drawloom")):
        with pytest.raises(SystemExit):
            main(["--help"], own)
        printed = capsys.readouterr().out
        groups = re.findall(r"^(\w+):\n((?:  .*\n)+)", printed, re.MULTILINE)
        names = [name for _, lines in groups for name in re.findall(r"^  ([a-z][\w-]*)", lines, re.MULTILINE)]
        assert names == list(find_command_files(own)) and ("stocktaking" in dict(groups)) == (own is project)


def test_the_version_option_prints_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`drawloom --version` prints it, with exit code 0."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"drawloom {drawloom.__version__}\n"


def test_timings_go_to_stderr(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """`run --timings` prints a table to stderr and nothing to stdout."""
    assert main(["run", "small", "--timings"], project) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines()[0].split() == ["ms", "build", "open", "close"]


def test_importing_a_missing_package_is_a_user_error(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--import` of a missing package exits with 2, and a folder in the current folder is imported."""
    assert main(["check", "small", "--import", "no_such_package"], project) == 2
    assert capsys.readouterr().err.startswith("--import no_such_package: there is no package, folder or file")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_lab").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["check", "small", "--import", "my_lab"], project) == 0
    assert main(["list", "--import", "os", "--plugins"], project) == 2
    assert main(["list", "--plugins"], project) == 0
    assert "no installed package declares" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "not enough memory: an allocation failed"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes."), "not enough memory: Default"),
        (RuntimeError("can't start new thread"), "no more threads can be started"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "aaa"), "aaa: the file system allows no name as long as"),
    ],
)
def test_limits_of_a_machine_are_reported_without_a_traceback(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, words: str
) -> None:
    """Missing memory and threads, and long file names, are reported in one line, with exit code 1."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Project, "load", fail)
    assert main(["check", "small"], project) == 1
    assert capsys.readouterr().err.startswith(words)


def test_a_removed_current_folder_is_an_error_in_words(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A removed current folder exits with 1 and one line."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["check", "small"], project) == 1
    assert capsys.readouterr().err == "the current folder has been removed; change to another one\n"


def test_the_language_server_names_a_missing_package(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lsp` without its optional package pygls names the package and the extra."""
    monkeypatch.delitem(sys.modules, "drawloom.graph.lsp.server", raising=False)
    monkeypatch.setitem(sys.modules, "pygls.exceptions", None)
    assert main(["lsp"], project) == 1
    assert capsys.readouterr().err == "the package 'pygls' is missing; pip install 'drawloom[lsp]'\n"
