"""An editor and its language server, over pipes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException

from support.editor import ROOT, Editor


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    """Start an editor for the shop's recipes."""
    with Editor(tmp_path_factory.mktemp("shop")) as editor:
        yield editor


def test_problems_follow_the_text(editor: Editor) -> None:
    """Typing updates the problems in a document and in documents that extend it."""
    assert editor.type("base.toml", 'extends = "small"\n') == []
    assert editor.type("mine.toml", 'extends = "base.toml"\n[trainer]\nworkers = 3\n') == []
    assert editor.type("base.toml", 'extends = "small"\n[store]\nsize = 2\n') == []
    (problem,) = editor.problems("mine.toml")
    assert problem == "2:10-2:11 [trainer] 3 workers can't share 2 values; write at most 2"
    assert editor.type("base.toml", 'extends = "small"\n[store]\nsize = "x\n')[0].startswith("2:8-")
    assert editor.problems("mine.toml")[0].startswith("0:0-0:21 base.toml:3:")
    assert editor.type("base.toml", 'extends = "small"\n[store]\nsize = 3\n') == editor.problems("mine.toml") == []


def test_other_toml_files_are_left_alone(editor: Editor) -> None:
    """TOML files that are not recipes have no marks."""
    assert editor.type("pyproject.toml", "[project]\nname = [\n") == []


@pytest.mark.parametrize(("encoding", "column"), [("utf-16", 13), ("utf-8", 15), ("utf-32", 12)])
def test_columns_are_in_the_units_of_the_editor(tmp_path: Path, encoding: str, column: int) -> None:
    """Columns count bytes, UTF-16 units or code points, and U+2028 does not end a line."""
    text = 'extends = "small"\n# \u2028\n[menu]\nuse = "pages.menu"\nlinks = {}\nhue = ["\U0001f9f6", 3]\n'
    with Editor(tmp_path, encoding=encoding) as editor:
        assert editor.type("mine.toml", text)[0].startswith(f"5:{column}-5:{column + 1} [menu] hue[1]: ")


def test_completions_replace_the_typed_token(editor: Editor) -> None:
    """A completion replaces the whole token with its quotes, and fitting components come first."""
    editor.type("typed.toml", 'extends = "small"\n[page]\nstore = { use = "stores.me" }\n')
    items = editor.ask("completion", "typed.toml", '"stores.me|"').items
    first = min(items, key=lambda item: item.sort_text)
    assert first.label.startswith("stores.") and first.filter_text.startswith('"stores.')
    assert {(item.text_edit.range.start.character, item.text_edit.range.end.character) for item in items} == {(16, 27)}
    assert first.detail
    assert editor.ask("hover", "typed.toml", '"stores.me|"').contents.value.startswith(
        "```text\nno component is called"
    )


def test_a_node_is_renamed_in_open_and_in_saved_recipes(editor: Editor) -> None:
    """A rename returns edits of open and saved recipes, and refuses a taken name with the reason."""
    (editor.folder / "shop.toml").write_text('extends = "small"\n[kiosk]\nuse = "pages.plain"\ntitle = "K"\n', "utf-8")
    editor.type("street.toml", 'extends = "shop.toml"\n[trainer]\npages = ["@kiosk"]\n[kiosk]\ntitle = "S"\n')
    edits = editor.ask("rename", "street.toml", '"@ki|osk"', new_name="stall").changes
    assert {
        Path(uri).name: [(str(edit.range), edit.new_text) for edit in file_edits] for uri, file_edits in edits.items()
    } == {
        "shop.toml": [("1:1-1:6", "stall")],
        "street.toml": [("2:11-2:16", "stall"), ("3:1-3:6", "stall")],
    }
    assert editor.ask("prepare_rename", "street.toml", '"@ki|osk"').placeholder == "kiosk"
    assert editor.ask("prepare_rename", "street.toml", "ti|tle = ") is None
    with pytest.raises(JsonRpcException, match=r"street.toml already has 'page'"):
        editor.ask("rename", "street.toml", '"@ki|osk"', new_name="page")
    context = lsp.ReferenceContext(include_declaration=True)
    assert len(editor.ask("references", "street.toml", '"@ki|osk"', context=context)) == 3
    (definition,) = editor.ask("definition", "street.toml", '"@ki|osk"')
    assert Path(definition.uri).name == "shop.toml" and str(definition.range.start) == "1:0"


@pytest.mark.parametrize("is_imported", [False, True])
def test_only_options_import_components_of_the_workspace(tmp_path: Path, is_imported: bool) -> None:
    """A module that a recipe names is imported only with --import, and its output is not a message."""
    package = tmp_path / "mine" / "stores"
    package.mkdir(parents=True)
    source = (ROOT / "tests/support/shop/components/stores/memory.py").read_text("utf-8")
    (package / "noisy.py").write_text(f'{source}\nprint("imported")\nopen("imported", "w").close()\n', "utf-8")
    with Editor(tmp_path, shop=False, options={"import": ["mine"]} if is_imported else None) as editor:
        problems = editor.type("a.toml", '[store]\nuse = "mine.stores.noisy"\nsize = 0\n')
    assert (tmp_path / "imported").exists() == is_imported
    assert [problem.partition(";")[0].partition("] ")[2] for problem in problems] == [
        "size: 0 is less than 1" if is_imported else "no component is called 'mine.stores.noisy'"
    ]


def test_a_missing_package_is_reported(tmp_path: Path) -> None:
    """The server reports a missing package and goes on without it."""
    with Editor(tmp_path, options={"import": "nobodys"}) as editor:
        assert editor.type("a.toml", 'extends = "small"\n') == []
        assert editor.messages == ["--import nobodys: there is no package, folder or file 'nobodys'"]


def test_files_that_are_not_open_are_read_from_disk(editor: Editor) -> None:
    """A file changed by another program is read again, and a closed document has its saved text and no marks."""
    editor.save_elsewhere("low.toml", 'extends = "small"\n')
    assert editor.type("high.toml", 'extends = "low.toml"\n[trainer]\nworkers = 3\n') == []
    editor.save_elsewhere("low.toml", 'extends = "small"\n[store]\nsize = 2\n')
    assert "3 workers can't share 2 values" in editor.problems("high.toml")[0]
    assert editor.type("low.toml", 'extends = "small"\n[store]\nsize = 0\n') != []
    assert editor.problems("high.toml")[0].startswith("0:0-0:20 low.toml:3:8: [store] size: 0 is less than 1")
    editor.close("low.toml")
    assert "3 workers can't share 2 values" in editor.problems("high.toml")[0] and editor.problems("low.toml") == []
