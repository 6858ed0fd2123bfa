"""Randomly drawn recipes on randomly drawn meshes, against the same run in one process."""

from pathlib import Path
from random import Random

import pytest

from support import drawn_recipes
from support.runs import drawloom, series, take_back, write_corpus

COMMON = ("run", "tiny.toml", "precision.parameter=float64", "trainer.steps=4", "trainer.on_finish=[]")
CADENCES = ("evaluate.every=2", "checkpoint.every=2")
LEARNED = ("step", "tokens", "loss", "grad_norm", "validation_loss")


def ran(place: Path, name: str, words: tuple[str, ...], ranks: int) -> bool:
    """Whether a run got to its end; otherwise it was refused in words before it began."""
    outcomes = drawloom(place, *COMMON, *CADENCES, f"run.name={name}", *words, ranks=ranks)
    printed = "\n".join(outcome.text for outcome in outcomes)
    codes = {outcome.code for outcome in outcomes}
    assert codes in ({0}, {2}) and "Traceback" not in printed, f"{ranks} ranks, {words}: {codes}\n{printed}"
    assert "command line: warning" not in printed, printed  # such as of a drawn node that is not built
    return codes == {0}


def numbers(run: Path) -> list[float]:
    """What every step of a run learned, one after another; 0 where it was not measured."""
    return [value or 0.0 for step in series(run, *LEARNED) for value in step]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(24))
def test_a_drawn_recipe_has_the_steps_of_one_process_on_any_mesh(seed: int, tmp_path: Path) -> None:
    """Losses and norms of a run on one mesh, resumed on another, are one process's in float64, or it is refused."""
    draw = Random(seed)
    drawn = drawn_recipes.recipe(draw)
    write_corpus(tmp_path)
    assert ran(tmp_path, "one", (*drawn.words, "batch.micro_size=2"), ranks=1), drawn
    # Muon orthogonalises in bfloat16, and rounds the last bits of float64 up or down.
    close = 1e-3 if drawn.optimizer == "muon" else 1e-8
    wanted = numbers(tmp_path / "runs/one")
    finished: list[tuple[str, ...]] = []
    for _ in range(9):
        ranks, words = drawn_recipes.mesh(draw, drawn)
        if finished:
            take_back(tmp_path / "runs/meshed", 2)
        if ran(tmp_path, "meshed", (*drawn.words, *words), ranks):
            finished.append(words)
            assert numbers(tmp_path / "runs/meshed") == pytest.approx(wanted, rel=close), (drawn, finished)
        if len(finished) == 2:
            return
    raise AssertionError(f"too many meshes were refused for {drawn}")
