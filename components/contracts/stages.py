"""Contracts for stage ports and their parameters."""

import tempfile
from pathlib import Path

from drawloom.graph.testing import expect
from drawloom.ports import ModelExport


def an_exported_folder_has_a_config_and_weights(export: ModelExport) -> None:
    """An export has config.json and safetensors files."""
    with tempfile.TemporaryDirectory(prefix="drawloom-contract-") as folder:
        export.gather_and_export_to(Path(folder) / "model")
        files = {path.name for path in (Path(folder) / "model").iterdir()}
    expect("config.json" in files, f"an export has no config.json, and {', '.join(sorted(files))}")
    expect(any(name.endswith(".safetensors") for name in files), "an export has no safetensors file")
