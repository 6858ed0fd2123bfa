"""Random recipes on random meshes, compared with the same run in one process."""

from pathlib import Path
from random import Random

import pytest

from support import drawn_recipes
from support.runs import drawloom, series, take_back, write_corpus

COMMON = ("run", "tiny.toml", "precision.parameter=float64", "trainer.steps=4", "trainer.on_finish=[]")
CADENCES = ("evaluate.every=2", "checkpoint.every=2")
LEARNED = ("step", "tokens", "loss", "grad_norm", "validation_loss")


def run_to_end(folder: Path, name: str, words: tuple[str, ...], ranks: int) -> bool:
    """Run a recipe, and return whether it finished; otherwise it was rejected with a message at the start."""
    outcomes = drawloom(folder, *COMMON, *CADENCES, f"run.name={name}", *words, ranks=ranks)
    printed = "\n".join(outcome.text for outcome in outcomes)
    codes = {outcome.code for outcome in outcomes}
    assert codes in ({0}, {2}) and "Traceback" not in printed, f"{ranks} ranks, {words}: {codes}\n{printed}"
    assert "command line: warning" not in printed, printed  # such as for a drawn node that nothing uses
    return codes == {0}


def numbers(run: Path) -> list[float]:
    """Return the numbers of all steps in one list, with 0 for missing ones."""
    return [value or 0.0 for step in series(run, *LEARNED) for value in step]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(24))
def test_random_recipe_matches_one_process_on_random_meshes(seed: int, tmp_path: Path) -> None:
    """A float64 run on one mesh, resumed on another, has one process's losses and norms, or is rejected."""
    draw = Random(seed)
    drawn = drawn_recipes.recipe(draw)
    write_corpus(tmp_path)
    assert run_to_end(tmp_path, "one", (*drawn.words, "batch.micro_size=2"), ranks=1), drawn
    # Muon orthogonalizes in bfloat16, which amplifies differences in the last bits of float64.
    tolerance = 1e-3 if drawn.optimizer == "muon" else 1e-8
    wanted = numbers(tmp_path / "runs/one")
    finished: list[tuple[str, ...]] = []
    for _ in range(9):
        ranks, words = drawn_recipes.mesh(draw, drawn)
        if finished:
            take_back(tmp_path / "runs/meshed", 2)
        if run_to_end(tmp_path, "meshed", (*drawn.words, *words), ranks):
            finished.append(words)
            assert numbers(tmp_path / "runs/meshed") == pytest.approx(wanted, rel=tolerance), (drawn, finished)
        if len(finished) == 2:
            return
    raise AssertionError(f"too many meshes were refused for {drawn}")
