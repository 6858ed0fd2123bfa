"""Contract for the port of adapters."""

import torch
from torch import nn

from drawloom.graph.testing import expect
from drawloom.ports import Adapter


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
