"""Experts partitioned over ranks."""

import torch

from drawloom.components.adapters.lora import Lora
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.parallel.split_experts import split_experts
from drawloom.components.weights.adapted import freeze_adapt_and_list_targets
from support.doubles import SilentRank
from support.qwen3 import sparse, whole


def test_each_rank_holds_its_experts_of_every_layer_and_nothing_else_is_split() -> None:
    """Two ranks have the first and second half of all expert parameters and their adapter factors."""
    splits = []
    for rank in range(2):
        with torch.device("meta"):
            module = whole(sparse(num_experts=6, num_hidden_layers=3, mlp_only_layers=[1]))
            freeze_adapt_and_list_targets([Lora(targets=["experts.down_proj", "q_proj"], rank=2, alpha=4.0)], module)
        before = {name: tuple(part.shape) for name, part in module.named_parameters()}
        splits.append(split_experts(module, SilentRank(rank, 2)))
        assert splits[-1].keys() == {name for name in before if ".experts." in name} and len(splits[-1]) == 8
        for name, split in splits[-1].items():
            assert tuple(module.get_parameter(name).shape) == split.tensor_slice.size == (3, *before[name][1:])
    for name, split in splits[0].items():
        assert (split.tensor_slice.offsets[0], splits[1][name].tensor_slice.offsets[0]) == (0, 3)


def test_one_rank_keeps_all_experts() -> None:
    """Nothing is split, and no parameter is replaced."""
    module = whole(sparse())
    before = dict(module.named_parameters())
    assert split_experts(module, SingleProcess()) == {}
    assert all(part is before[name] for name, part in module.named_parameters())
