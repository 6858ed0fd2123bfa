"""Free disk space that a run requires before its first step."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from drawloom.components.checkpoint import saves
from support.processes import run_ranks
from support.runs import Outcome, command, write_corpus

EMA = '[ema]\nuse = "phases.ema"\n[edit.trainer.phases]\nafter."@optimizer" = "@ema"\n'
MUON = '[optimizer]\nuse = "optim.muon"\nlr = 0.01\n'
STOCHASTIC = '[optimizer]\nuse = "optim.stochastic_adamw"\nlr = 0.01\n'


def _record_forecast(folder: Path, words: Sequence[str]) -> Outcome:
    """Run a command, and write its forecast of the first checkpoint's size into the file `forecast`."""

    def record(checkpoints: Path, expected_bytes: int, likely_bytes: int) -> None:
        (folder / "forecast").write_text(json.dumps(expected_bytes), "utf-8")

    saves._check_free_bytes = record
    return command(folder, words, None)


@pytest.mark.parametrize(
    ("tables", "ranks", "settings"),
    [
        (MUON, 2, ["mesh.data_shard=2", "precision.parameter=float32", "precision.compute=bfloat16"]),
        (STOCHASTIC, 1, []),
        (EMA, 2, []),
    ],
    ids=["muon sharded with masters", "stochastic adamw", "average with replicas"],
)
def test_the_forecast_equals_the_checkpoint_size_after_a_step(
    tmp_path: Path, tables: str, ranks: int, settings: Sequence[str]
) -> None:
    """On any mesh the forecast, with moments, averages and master weights, is within 5 % of the files."""
    write_corpus(tmp_path)
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(recipe.read_text("utf-8") + tables, "utf-8")
    words = ["run", "tiny.toml", "trainer.steps=1", "trainer.on_finish=[]", "model.hidden_size=64"]
    words += ["batch.micro_size=2", *settings]
    outcomes = run_ranks(_record_forecast, ranks, tmp_path, words, timeout=120, variables=ranks > 1)
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes
    forecast = json.loads((tmp_path / "forecast").read_text("utf-8"))
    written = sum(path.stat().st_size for path in (tmp_path / "runs/tiny/checkpoints/step-1").glob("rank*"))
    assert forecast == pytest.approx(written, rel=0.05)
