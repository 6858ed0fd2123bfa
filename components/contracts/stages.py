"""Contracts for stage ports and their parameters."""

import tempfile
from pathlib import Path

import torch

from drawloom.graph.testing import expect
from drawloom.ports import AveragedWeights, ModelExport


def averages_do_not_change_while_they_replace_weights(average: AveragedWeights) -> None:
    """Averages do not change while they replace the weights or afterwards, even if their user fails."""
    before = {name: tensor.clone() for name, tensor in average.averages().items()}
    for fails in (False, True):
        try:
            with average.use_averages():
                for name, tensor in average.averages().items():
                    expect(torch.equal(tensor, before[name]), f"the average of {name} changes when it is used")
                if fails:
                    raise InterruptedError
        except InterruptedError:
            pass
        after = average.averages()
        has_same_names = before.keys() == after.keys()
        is_same = has_same_names and all(torch.equal(after[name], tensor) for name, tensor in before.items())
        expect(is_same, "averages change when they are used")


def an_exported_folder_has_a_config_and_weights(export: ModelExport) -> None:
    """An export has config.json and safetensors files."""
    with tempfile.TemporaryDirectory(prefix="drawloom-contract-") as folder:
        export.gather_and_export_to(Path(folder) / "model")
        files = {path.name for path in (Path(folder) / "model").iterdir()}
    expect("config.json" in files, f"an export has no config.json, and {', '.join(sorted(files))}")
    expect(any(name.endswith(".safetensors") for name in files), "an export has no safetensors file")
