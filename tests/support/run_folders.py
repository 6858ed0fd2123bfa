"""Run folders as a run would have written them."""

import json
from pathlib import Path


def write_run(
    folder: Path, *, lr: float = 1e-3, seed: int = 0, losses: tuple[float, ...] = (3.0, 2.0), log: str = ""
) -> None:
    """Write a run folder with a recipe, metrics with validation losses, and a log unless it is empty."""
    (folder / "log").mkdir(parents=True)
    recipe = (
        f'[run]\nuse = "run.job"\nname = "{folder.name}"\nseed = {seed}\n[optimizer]\nuse = "optim.adamw"\nlr = {lr}\n'
    )
    (folder / "recipe.lock.toml").write_text(recipe, "utf-8")
    rows = [
        {"step": step, "loss": loss + 1, "validation_loss": loss, "tokens": 100 * step, "tokens_per_second": 50.0}
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    if log:
        (folder / "log/rank-0.log").write_text(log, "utf-8")
