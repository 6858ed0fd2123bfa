"""From names to layers."""

import os
from pathlib import Path

import pytest

from drawloom.graph.problems import RecipeError
from drawloom.graph.recipe.loading import RecipeFolder, read_layers


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sources(name: str, *overlays: str, shipped: str = "shipped") -> list[str]:
    """The files that a recipe is made of, lowest first."""
    return [layer.source for layer in read_layers(name, overlays, RecipeFolder(Path(shipped)))]


def written(**texts: str) -> None:
    """Recipe files."""
    for name, text in texts.items():
        Path(f"{name}.toml").write_text(text, "utf-8")


def test_a_base_of_two_bases_is_merged_once_below_both() -> None:
    """A base does not undo changes of another base to their common base."""
    written(ground="", left='extends = "ground.toml"', right='extends = "ground.toml"')
    written(top='extends = ["left.toml", "right.toml"]')
    assert sources("top.toml") == ["ground.toml", "left.toml", "right.toml", "top.toml"]


def test_the_base_of_an_overlay_is_not_merged_twice() -> None:
    """An overlay that extends what the recipe extends lies on top, its base stays below."""
    written(ground="", top='extends = "ground.toml"', over='extends = "ground.toml"')
    assert sources("top.toml", "over.toml") == ["ground.toml", "top.toml", "over.toml"]


def test_bases_that_share_bases_are_read_in_linear_time() -> None:
    """Each of forty files extends two that extend the one below: 2^40 ways down, eighty files."""
    written(a0="", b0="")
    for number in range(1, 40):
        both = f'extends = ["a{number - 1}.toml", "b{number - 1}.toml"]'
        written(**{f"a{number}": both, f"b{number}": both})
    assert len(sources("a39.toml")) == 79


def test_a_chain_of_bases_that_is_too_long_is_a_problem() -> None:
    """A thousand recipes that extend each other are an error in words, and no RecursionError."""
    written(**{f"r{number}": f'extends = "r{number + 1}.toml"' for number in range(1500)}, r1500="")
    with pytest.raises(RecipeError, match=r"r50\.toml is the base of 50 recipes in a chain of `extends`"):
        sources("r0.toml")
    assert len(sources("r1451.toml")) == 50


def test_a_run_folder_is_a_recipe() -> None:
    """The folder of a run may be given instead of the resolved recipe in it."""
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/recipe.lock.toml").write_text("format = 1\n", "utf-8")
    assert sources("runs/one") == sources("runs/one/") or sources("runs/one") == ["runs/one/recipe.lock.toml"]


def test_a_file_in_the_current_directory_wins_over_a_shipped_recipe() -> None:
    """A file of that name wins over a shipped recipe; a shipped one is labelled by its file's name alone."""
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
    """A base is beside the recipe or shipped: no way leads out, and nothing but a regular file is read."""
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
    written(base="")
    Path("folder/top.toml").write_text('extends = "../base.toml"', "utf-8")
    assert sources("folder/top.toml") == ["base.toml", "folder/top.toml"]


@pytest.mark.parametrize("name", ["x" * 5000, "no/such/place", "folder", ""])
def test_a_path_that_is_not_a_recipe_is_a_problem(here: Path, name: str) -> None:
    """Any string that is not the name of a recipe gives a problem, and no traceback."""
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
def test_a_file_or_a_run_of_that_name_is_offered(name: str, meant: str | None) -> None:
    """Without its ending or its folder a name is no recipe, nor is a file with a typo: what it may be is said."""
    for folder in ("folder", "runs/one"):
        Path(folder).mkdir(parents=True)
    for file in ("mine.toml", "folder/mine.toml", "runs/one/recipe.lock.toml"):
        Path(file).write_text("", "utf-8")
    with pytest.raises(RecipeError) as caught:
        sources(name)
    [problem] = caught.value.problems
    assert problem.hint == (f"did you mean {meant!r}?" if meant else "")


def test_the_file_that_extends_may_mean_is_offered() -> None:
    """The hint names a similar file beside the recipe, by its path from the current directory."""
    Path("folder").mkdir()
    Path("folder/base.toml").write_text("", "utf-8")
    Path("folder/top.toml").write_text('extends = "bsae.toml"', "utf-8")
    with pytest.raises(RecipeError, match=r"did you mean 'folder/base.toml'"):
        sources("folder/top.toml")
