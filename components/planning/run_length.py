"""A run's length in steps and epochs."""

from typing import NamedTuple

from drawloom import Recipe, RecipeError, UserError
from drawloom.ports import EpochCounter, Mesh, PerDimension, count_steps_of_epochs


class RunLength(NamedTuple):
    """A run's steps; if the recipe's length is in epochs, also these and their rows."""

    steps: int
    epochs: float | None = None
    rows_per_epoch: int | None = None

    def __str__(self) -> str:
        """Return the length as printed."""
        steps = f"{self.steps:,} steps"
        return steps if self.epochs is None else f"{self.epochs:g} epochs of {self.rows_per_epoch:,} rows: {steps}"


def count_run_length(recipe: Recipe) -> RunLength | None:
    """
    Return a run's length, or None if it has none. For a length in epochs, open the data in this process alone.

    Raises UserError without the data.
    """
    settings = recipe.graph.nodes[recipe.project.root].settings
    if (epochs := settings.get("epochs")) is None:
        return RunLength(settings["steps"]) if settings.get("steps") else None
    [counter] = recipe.graph.implementers(EpochCounter)
    alone = recipe.with_values(
        {mesh: dict.fromkeys(PerDimension().settings(), 1) for mesh in recipe.graph.implementers(Mesh)}
    )
    try:
        with alone.open(counter) as opened:
            data: EpochCounter = opened[counter]
            return RunLength(count_steps_of_epochs(epochs, data), epochs, data.rows_per_epoch)
    except (UserError, RecipeError) as error:
        hint = "write trainer.steps=N for an estimate without the data"
        raise UserError(f"the steps of {epochs:g} epochs follow from the data: {error}; {hint}") from error
