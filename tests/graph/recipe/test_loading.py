"""Layers of recipes, read by name."""

import os
from pathlib import Path

import pytest

from drawloom.graph.problems import RecipeError
from drawloom.graph.recipe.loading import RecipeFolder, read_layers


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sources(name: str, *overlays: str, shipped: str = "shipped") -> list[str]:
    """List a recipe's files, lowest layer first."""
    return [layer.source for layer in read_layers(name, overlays, RecipeFolder(Path(shipped)))]


def write(**texts: str) -> None:
    """Write recipe files."""
    for name, text in texts.items():
        Path(f"{name}.toml").write_text(text, "utf-8")


def test_a_base_of_two_bases_is_merged_once_below_both() -> None:
    """A base does not undo changes of another base to their common base."""
    write(ground="", left='extends = "ground.toml"', right='extends = "ground.toml"')
    write(top='extends = ["left.toml", "right.toml"]')
    assert sources("top.toml") == ["ground.toml", "left.toml", "right.toml", "top.toml"]


def test_the_base_of_an_overlay_is_not_merged_twice() -> None:
    """An overlay with the recipe's base is on top, and the base stays below."""
    write(ground="", top='extends = "ground.toml"', over='extends = "ground.toml"')
    assert sources("top.toml", "over.toml") == ["ground.toml", "top.toml", "over.toml"]


def test_bases_that_share_bases_are_read_in_linear_time() -> None:
    """Eighty files with 2^40 paths between them are read once."""
    write(a0="", b0="")
    for number in range(1, 40):
        both = f'extends = ["a{number - 1}.toml", "b{number - 1}.toml"]'
        write(**{f"a{number}": both, f"b{number}": both})
    assert len(sources("a39.toml")) == 79


def test_a_chain_of_bases_that_is_too_long_is_a_problem() -> None:
    """A chain with more than 50 bases is a RecipeError instead of a RecursionError."""
    write(**{f"r{number}": f'extends = "r{number + 1}.toml"' for number in range(1500)}, r1500="")
    with pytest.raises(RecipeError, match=r"r50\.toml is the base of 50 recipes in a chain of `extends`"):
        sources("r0.toml")
    assert len(sources("r1451.toml")) == 50


def test_a_run_folder_is_a_recipe() -> None:
    """A run folder is accepted in place of its resolved recipe."""
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/recipe.lock.toml").write_text("format = 1\n", "utf-8")
    assert sources("runs/one") == sources("runs/one/") or sources("runs/one") == ["runs/one/recipe.lock.toml"]


def test_a_file_in_the_current_directory_wins_over_a_shipped_recipe() -> None:
    """A file in the current directory takes precedence, and a shipped recipe is labelled by its file name."""
    Path("shipped").mkdir()
    Path("shipped/one.toml").write_text("", "utf-8")
    (layer,) = read_layers("one", (), RecipeFolder(Path("shipped")))
    assert (layer.source, layer.label) == (os.path.join("shipped", "one.toml"), "one.toml")


@pytest.mark.parametrize(
    ("extends", "code"),
    [
        ("/etc/base.toml", "DL106"),
        ("../../base.toml", "DL106"),
        ("folder/../../../base.toml", "DL106"),
        ("link.toml", "DL106"),
        ("linked/base.toml", "DL106"),
        ("\\u0000.toml", "DL102"),
        ("x" * 5000 + ".toml", "DL102"),
        ("folder.toml", "DL102"),
        ("pipe.toml", "DL102"),
        ("../shipped/base", "DL101"),
        ("", "DL101"),
    ],
)
def test_extends_outside_of_the_allowed_folders_is_refused(here: Path, extends: str, code: str) -> None:
    """A base must be a regular file beside the recipe or a shipped recipe, also through links."""
    room = here / "room"
    (room / "folder.toml").mkdir(parents=True)
    (here / "base.toml").write_text("", "utf-8")
    (room / "link.toml").symlink_to("/etc/hosts")
    (room / "linked").symlink_to("/etc")
    os.mkfifo(room / "pipe.toml")
    (room / "top.toml").write_text(f'extends = "{extends}"', "utf-8")
    os.chdir(room)
    with pytest.raises(RecipeError) as caught:
        sources("top.toml")
    assert [problem.code for problem in caught.value.problems] == [code]


def test_a_base_above_is_fine_inside_the_current_directory(here: Path) -> None:
    """`../base.toml` may be extended from a subfolder of the current directory."""
    (here / "folder").mkdir()
    write(base="")
    Path("folder/top.toml").write_text('extends = "../base.toml"', "utf-8")
    assert sources("folder/top.toml") == ["base.toml", "folder/top.toml"]


@pytest.mark.parametrize("name", ["x" * 5000, "no/such/place", "folder", ""])
def test_a_path_that_is_not_a_recipe_is_a_problem(here: Path, name: str) -> None:
    """Any string besides a recipe's name is a problem without a traceback."""
    (here / "folder").mkdir()
    with pytest.raises(RecipeError, match="there is no recipe"):
        sources(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("mine", "mine.toml"),
        ("folder/mine", "folder/mine.toml"),
        ("one", "runs/one"),
        ("mien.toml", "mine.toml"),
        ("folder/mien.toml", "folder/mine.toml"),
        ("[o]ne", None),
        ("other.toml", None),
        ("nowhere/mine.toml", None),
    ],
)
def test_the_hint_names_a_similar_file_or_run(name: str, meant: str | None) -> None:
    """A name without its ending or folder, or with a typing error, gets a hint with the intended file."""
    for folder in ("folder", "runs/one"):
        Path(folder).mkdir(parents=True)
    for file in ("mine.toml", "folder/mine.toml", "runs/one/recipe.lock.toml"):
        Path(file).write_text("", "utf-8")
    with pytest.raises(RecipeError) as caught:
        sources(name)
    [problem] = caught.value.problems
    assert problem.hint == (f"did you mean {meant!r}?" if meant else "")


def test_the_hint_names_the_file_that_extends_may_mean() -> None:
    """The hint names a similar file beside the recipe, by its path from the current directory."""
    Path("folder").mkdir()
    Path("folder/base.toml").write_text("", "utf-8")
    Path("folder/top.toml").write_text('extends = "bsae.toml"', "utf-8")
    with pytest.raises(RecipeError, match=r"did you mean 'folder/base.toml'"):
        sources("folder/top.toml")
