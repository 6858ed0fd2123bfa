"""Whether a recipe may go on in a folder."""

import logging
from pathlib import Path

import pytest

from drawloom.components.run.locks import settle_recipe
from drawloom.graph import ResolvedRecipe, UserError
from drawloom.graph.recipe.lockfile import RecipeChange

FREE = RecipeChange("checkpoint", "every", "10", "20", "safe")
HEAVY = RecipeChange("optimizer", "rate", "1e-3", "1e-4", "changes_training")


def _recipe(text: str, *changes: RecipeChange, accept: bool = False) -> ResolvedRecipe:
    return ResolvedRecipe(text, "hash", accept, lambda older: list(changes) if older != text else [])


def _lock(folder: Path) -> str:
    return (folder / "recipe.lock.toml").read_text()


def test_a_new_folder_takes_the_recipe(tmp_path: Path) -> None:
    """The text is written as it is, and nothing else is left in the folder."""
    settle_recipe(tmp_path, _recipe("# format 1\nname = 'é'\n"))
    assert _lock(tmp_path) == "# format 1\nname = 'é'\n"
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.lock.toml"]


def test_free_changes_are_logged_and_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder's recipe is then the new one."""
    caplog.set_level(logging.INFO)
    settle_recipe(tmp_path, _recipe("old"))
    settle_recipe(tmp_path, _recipe("new", FREE))
    assert _lock(tmp_path) == "new"
    assert "[checkpoint] every: 10 -> 20 (safe)" in caplog.text


def test_other_changes_are_refused_and_all_listed(tmp_path: Path) -> None:
    """The message has every change, the free ones too, and names the way out; the folder keeps its recipe."""
    settle_recipe(tmp_path, _recipe("old"))
    with pytest.raises(UserError) as caught:
        settle_recipe(tmp_path, _recipe("new", FREE, HEAVY))
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        f"{tmp_path} holds a run of another recipe, which this one differs from in:\n"
        "  [checkpoint] every: 10 -> 20 (safe)\n"
        "  [optimizer] rate: 1e-3 -> 1e-4 (changes_training)\n"
        "safe changes alone would do; name another run, or go on with --accept-changes"
    )
    assert _lock(tmp_path) == "old"


def test_accepted_changes_are_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With --accept-changes the same recipe goes on, and says what changed."""
    caplog.set_level(logging.INFO)
    settle_recipe(tmp_path, _recipe("old"))
    settle_recipe(tmp_path, _recipe("new", FREE, HEAVY, accept=True))
    assert _lock(tmp_path) == "new"
    assert "[optimizer] rate: 1e-3 -> 1e-4 (changes_training)" in caplog.text


def test_the_same_recipe_is_not_written_again(tmp_path: Path) -> None:
    """The file stays the same file."""
    settle_recipe(tmp_path, _recipe("old"))
    before = (tmp_path / "recipe.lock.toml").stat()
    settle_recipe(tmp_path, _recipe("old"))
    assert (tmp_path / "recipe.lock.toml").stat() == before


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"= nonsense"])
def test_a_damaged_lock_is_named(tmp_path: Path, damage: bytes) -> None:
    """What can't be compared is not guessed at: the file is named, and --accept-changes writes it anew."""

    def unreadable(older: str) -> list[RecipeChange]:
        raise ValueError("no TOML")

    (tmp_path / "recipe.lock.toml").write_bytes(damage)
    with pytest.raises(UserError, match=r"recipe.lock.toml can't be read"):
        settle_recipe(tmp_path, ResolvedRecipe("new", "hash", False, unreadable))
    settle_recipe(tmp_path, ResolvedRecipe("new", "hash", True, unreadable))
    assert _lock(tmp_path) == "new"
