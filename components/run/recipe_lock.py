"""The recipe that a run folder belongs to, and whether another one may go on in it."""

import logging
from pathlib import Path

from drawloom.components.storage.atomic_write import replace_file
from drawloom.graph import RecipeError, ResolvedRecipe, UserError
from drawloom.graph.recipe.lockfile import LOCK, RecipeChange

log = logging.getLogger("drawloom.run")


def settle_recipe(folder: Path, recipe: ResolvedRecipe) -> None:
    """
    Make this recipe the folder's own.

    Raises UserError if the folder has another that differs in more than free settings, unless changes are accepted.
    """
    path = folder / LOCK
    if not path.exists():
        return replace_file(path, recipe.text.encode())
    changes = _changes(path, recipe)
    if not recipe.accept_changes and any(change.kind != "free" for change in changes):
        raise UserError(_refusal(folder, changes), exit_code=2)
    for change in changes:
        log.info("%s: the recipe changed: %s", folder, change)
    if path.read_bytes() != recipe.text.encode():
        replace_file(path, recipe.text.encode())


def _changes(path: Path, recipe: ResolvedRecipe) -> list[RecipeChange]:
    try:
        return recipe.changes(path.read_text("utf-8"))
    except (RecipeError, ValueError) as error:
        if recipe.accept_changes:
            log.warning("%s can't be read and is written anew: %s", path, error)
            return []
        raise UserError(
            f"{path} can't be read, so nobody knows whether this recipe may go on there: {error}; "
            "--accept-changes goes on all the same",
            exit_code=2,
        ) from error


def _refusal(folder: Path, changes: list[RecipeChange]) -> str:
    lines = [f"{folder} holds a run of another recipe, which this one differs from in:"]
    lines += [f"  {change}" for change in changes]
    lines += ["free changes alone would do; name another run, or go on with --accept-changes"]
    return "\n".join(lines)
