"""Contracts for ports of stages, parametrizations and adapters."""

import math
import tempfile
from pathlib import Path

import attrs
import torch
from torch import nn

from drawloom.graph.testing import expect
from drawloom.ports import Adapter, ModelExport, Parametrization


def factors_are_positive_and_finite(parametrization: Parametrization) -> None:
    """Factors for a wider and deeper decoder are positive and finite."""
    scaling = parametrization.compute_scaling_for_size(hidden_size=4096, num_hidden_layers=32)
    roles = (scaling.outer, scaling.head, scaling.matrix, scaling.residual, scaling.vector, scaling.residual_vector)
    for role in roles:
        for name, factor in attrs.asdict(role).items():
            expect(0 < factor < math.inf, f"{name} is multiplied by {factor}")
    for factor in (scaling.residual_multiplier, scaling.logit_multiplier):
        expect(0 < factor < math.inf, f"outputs are multiplied by {factor}")


def a_module_without_targets_is_unchanged(adapter: Adapter) -> None:
    """An adapter matches, adds, renames and trains nothing in a frozen module without its targets."""
    expect(len(adapter.targets) > 0, "the adapter has no targets")
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)).requires_grad_(False)
    before = dict(module.named_parameters())
    expect(not adapter.adapt_and_list_matched_targets(module), "it finds targets in a module that has none")
    after = dict(module.named_parameters())
    expect(before.keys() == after.keys(), "it adds or renames parameters of a module without targets")
    expect(not any(param.requires_grad for param in after.values()), "it trains parameters that are not targets")


def an_exported_folder_has_a_config_and_weights(export: ModelExport) -> None:
    """An export has config.json and safetensors files."""
    with tempfile.TemporaryDirectory(prefix="drawloom-contract-") as folder:
        export.gather_and_export_to(Path(folder) / "model")
        files = {path.name for path in (Path(folder) / "model").iterdir()}
    expect("config.json" in files, f"an export has no config.json, and {', '.join(sorted(files))}")
    expect(any(name.endswith(".safetensors") for name in files), "an export has no safetensors file")
