"""Inputs of recomputed blocks in host memory, against inputs on the device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import drawloom
from drawloom.components.stages import offloaded_inputs
from drawloom.graph.cli.main import main
from support.observers_of_runs import TINY
from support.pipelines import batches
from support.steps import evaluate, train
from support.transfers import DelayedTransfers, NoWaits

LAYERS = 5


def gradients(folder: Path, transfers: Any, schedule: str) -> dict[str, Tensor]:
    """Return the gradients of two steps with recomputed blocks, whose inputs leave by these transfers, if any."""
    values = {
        "model": TINY | {"num_hidden_layers": LAYERS},
        "run": {"name": "small", "folder": str(folder / "run")},
        "schedule": {"use": f"pipeline.schedules.{schedule}"},
        "stages": {"recompute": "blocks"},
    }
    offload = {} if transfers is None else {"offload": {"use": "stages.offloaded_inputs"}}
    with drawloom.Recipe.load("first_run").with_values(values | offload).open(only="executor") as objects:
        executor = objects["executor"]
        for _ in range(2):
            train(executor, batches(3))
            evaluate(executor, batches(1))
        return {name: weight.grad.clone() for name, weight in executor.stages.named_parameters()}


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble_v"])
def test_inputs_in_host_memory_leave_no_trace(schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients have the same bits, whenever copies happen, and all inputs but every module's last one leave."""
    plain, transfers = gradients(tmp_path, None, schedule), DelayedTransfers(seed=3)
    monkeypatch.setattr(offloaded_inputs, "DeviceTransfers", lambda device: transfers)
    moved = gradients(tmp_path, transfers, schedule)
    assert all(torch.equal(moved[name], plain[name]) for name in plain)
    # A module's last input stays, and so does what another rank sent, because the executor keeps it.
    staying = 3 if schedule == "zero_bubble_v" else 1
    tokens = sum(batch.tokens.numel() for batch in batches(3))
    assert transfers.stored == transfers.fetched == 2 * (LAYERS - staying) * tokens * TINY["hidden_size"] * 4


def test_without_waits_gradients_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers that no pass waits for change gradients, so the comparison above can fail."""
    plain = gradients(tmp_path, None, "gpipe")
    monkeypatch.setattr(offloaded_inputs, "DeviceTransfers", lambda device: NoWaits(2))
    moved = gradients(tmp_path, 1, "gpipe")
    assert not all(torch.equal(moved[name], plain[name]) for name in plain)


def test_a_plan_counts_one_input(capsys: pytest.CaptureFixture[str]) -> None:
    """Planned activations do not grow with the layers: all inputs but the last one are not on the device."""

    def plan(layers: int, *words: str) -> int:
        edits = (f"model.num_hidden_layers={layers}", "stages.recompute=blocks", *words)
        main(["plan", "first_run", *edits, "batch.micro_size=16", "--device", "h100", "--format", "json"])
        activations = json.loads(capsys.readouterr().out)["memory"][0]["activations"]
        assert all(size > 0 for size in activations.values())
        return sum(size for label, size in activations.items() if label != "temporary")

    offload = "offload.use=stages.offloaded_inputs"
    assert plan(4, offload) == plan(8, offload) == plan(8) - 7 * 16 * 256 * 192 * 4


def test_check_asks_for_recomputed_blocks() -> None:
    """Inputs alone can leave only if blocks keep nothing else."""
    recipe = drawloom.Recipe.load("first_run", "offload.use=stages.offloaded_inputs", "stages.recompute=selective")
    with pytest.raises(drawloom.RecipeError, match=r'write recompute = "blocks" in .stages.'):
        recipe.check()
