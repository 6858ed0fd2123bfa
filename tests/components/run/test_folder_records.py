"""Whether a recipe may continue in a run folder."""

import logging
from pathlib import Path

import pytest

from drawloom.components.run.folder_records import list_recipe_changes_if_safe, update_lock_and_log_changes
from drawloom.graph import ResolvedRecipe, UserError
from drawloom.graph.recipe.lockfile import RecipeChange

FREE = RecipeChange("checkpoint", "every", "10", "20", "safe")
HEAVY = RecipeChange("optimizer", "rate", "1e-3", "1e-4", "changes_training")


def _recipe(text: str, *changes: RecipeChange, accept: bool = False) -> ResolvedRecipe:
    return ResolvedRecipe(text, "hash", accept, lambda older: list(changes) if older != text else [])


def claim_recipe(folder: Path, recipe: ResolvedRecipe) -> None:
    """Claim a folder's recipe for a run."""
    update_lock_and_log_changes(folder, recipe, list_recipe_changes_if_safe(folder, recipe))


def _lock(folder: Path) -> str:
    return (folder / "recipe.lock.toml").read_text()


def test_a_new_folder_gets_the_recipe(tmp_path: Path) -> None:
    """The text is written unchanged, and no other file is left."""
    claim_recipe(tmp_path, _recipe("# format 1\nname = 'é'\n"))
    assert _lock(tmp_path) == "# format 1\nname = 'é'\n"
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.lock.toml"]


def test_safe_changes_are_logged_and_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder then has the new recipe."""
    caplog.set_level(logging.INFO)
    claim_recipe(tmp_path, _recipe("old"))
    claim_recipe(tmp_path, _recipe("new", FREE))
    assert _lock(tmp_path) == "new"
    assert "[checkpoint] every: 10 -> 20 (safe)" in caplog.text


def test_other_changes_are_refused_and_all_listed(tmp_path: Path) -> None:
    """The message lists every change and the option to accept them; the folder keeps its recipe."""
    claim_recipe(tmp_path, _recipe("old"))
    with pytest.raises(UserError) as caught:
        claim_recipe(tmp_path, _recipe("new", FREE, HEAVY))
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        f"{tmp_path} holds a run of another recipe; the differences are:\n"
        "  [checkpoint] every: 10 -> 20 (safe)\n"
        "  [optimizer] rate: 1e-3 -> 1e-4 (changes_training)\n"
        "only safe changes are allowed; use another run name, or add --accept-changes"
    )
    assert _lock(tmp_path) == "old"


def test_changes_that_cannot_be_accepted_are_not_offered(tmp_path: Path) -> None:
    """If the saved state does not fit, --accept-changes would only fail later."""
    claim_recipe(tmp_path, _recipe("old"))
    with pytest.raises(UserError) as caught:
        claim_recipe(tmp_path, _recipe("new", RecipeChange("model", "hidden_size", "16", "32", "incompatible")))
    assert "--accept-changes" not in str(caught.value) and "use another run name" in str(caught.value)


def test_accept_changes_accepts_every_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With --accept-changes the folder gets the new recipe, and the changes are logged."""
    caplog.set_level(logging.INFO)
    claim_recipe(tmp_path, _recipe("old"))
    claim_recipe(tmp_path, _recipe("new", FREE, HEAVY, accept=True))
    assert _lock(tmp_path) == "new"
    assert "[optimizer] rate: 1e-3 -> 1e-4 (changes_training)" in caplog.text


def test_the_same_recipe_is_not_written_again(tmp_path: Path) -> None:
    """The file keeps its inode and its time of writing."""
    claim_recipe(tmp_path, _recipe("old"))
    before = (tmp_path / "recipe.lock.toml").stat()
    claim_recipe(tmp_path, _recipe("old"))
    after = (tmp_path / "recipe.lock.toml").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"= nonsense"])
def test_an_unreadable_lock_is_refused(tmp_path: Path, damage: bytes) -> None:
    """The error names the file; --accept-changes replaces it."""

    def unreadable(older: str) -> list[RecipeChange]:
        raise ValueError("no TOML")

    (tmp_path / "recipe.lock.toml").write_bytes(damage)
    with pytest.raises(UserError, match=r"recipe.lock.toml can't be read"):
        claim_recipe(tmp_path, ResolvedRecipe("new", "hash", False, unreadable))
    claim_recipe(tmp_path, ResolvedRecipe("new", "hash", True, unreadable))
    assert _lock(tmp_path) == "new"
