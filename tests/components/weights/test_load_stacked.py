"""Folders with a tensor for each expert, read as stacks."""

import torch

from drawloom.components.weights.load import StackedExperts
from support.tensor_sources import InMemoryTensors


def test_experts_are_stacked_if_all_of_them_are_there() -> None:
    """A stack has each expert at its number, gate before up; with a gap the single tensors stay as they are."""
    experts = {
        f"mlp.experts.{n}.{part}_proj.weight": torch.full((2, 3) if part != "down" else (3, 2), n + shift)
        for n in (1, 0, 2)
        for part, shift in (("gate", 0.25), ("up", 0.5), ("down", 0.75))
    }
    needed = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    source = StackedExperts(InMemoryTensors(experts | {"mlp.gate.weight": torch.ones(3, 3)}), needed)
    assert source.specs().keys() == set(needed)
    both, down = (source.tensor(name) for name in needed[:2])
    assert both.shape == source.specs()[needed[0]].shape == (3, 4, 3)
    assert both[..., 0].tolist() == [[n + 0.25] * 2 + [n + 0.5] * 2 for n in range(3)]
    assert down[:, 0, 0].tolist() == [0.75, 1.75, 2.75]
    del experts["mlp.experts.0.up_proj.weight"]
    assert "mlp.experts.2.gate_proj.weight" in StackedExperts(InMemoryTensors(experts), needed).specs()
