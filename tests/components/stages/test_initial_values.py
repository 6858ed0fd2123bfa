"""Memory and values of modules at the start of a run."""

from typing import Any

import pytest
import torch
from torch import nn

from drawloom.components.parallel.tensor_ranks import TensorRanks, split_over_ranks
from drawloom.components.ports.model import LayerRange
from drawloom.components.stages.initial_values import InitialValues, check_parameters_fit_device, get_device_memory
from drawloom.graph import UserError
from support.doubles import SilentRank
from support.qwen3 import dense


def fill_model(rank: int = 0, ranks: int = 1, seed: int = 1) -> tuple[dict[str, torch.Tensor], Any]:
    """Return a small model on one of several tensor ranks, drawn from a seed: its parameters, and their places."""
    model = dense(vocab_size=31)
    with torch.device("meta"):
        module: nn.Module = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
    places = {
        name: parameter_split.tensor_slice
        for name, parameter_split in split_over_ranks(module, TensorRanks(SilentRank(rank, ranks))).items()
    }
    InitialValues(model, seed, torch.device("cpu"), None, places).allocate_and_fill_modules([module])
    return dict(module.named_parameters()), places


def test_a_tensor_rank_draws_its_slice_of_the_whole() -> None:
    """A rank's values, evenly split or not, are the elements of the weight drawn by one process."""
    whole, none = fill_model()
    assert not none
    for rank in range(2):
        mine, places = fill_model(rank, 2)
        assert places.keys() < mine.keys() == whole.keys()
        for name, parameter in mine.items():
            expected = whole[name][places[name].index()] if name in places else whole[name]
            assert torch.equal(parameter, expected), name


def test_another_seed_draws_other_values() -> None:
    """Embeddings from two seeds differ, and from one seed are bitwise equal."""
    (first, _), (again, _), (other, _) = fill_model(), fill_model(), fill_model(seed=2)
    name = next(name for name, tensor in first.items() if tensor.ndim == 2)
    assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


def test_only_frozen_parameters_have_an_origin() -> None:
    """A checkpoint holds trained parameters; frozen ones follow from the seed recorded in the state."""
    values = InitialValues(dense(), 7, torch.device("cpu"), None, {})
    trained, frozen = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1), requires_grad=False)
    assert (
        values.fingerprint_frozen_source([trained]) == ""
        and values.fingerprint_frozen_source([trained, frozen]) == "seed 7"
    )
    assert "random weights" in values.format_changed_source_error()


def test_a_model_larger_than_the_memory_is_refused_before_it_is_made() -> None:
    """The meta device computes its size without memory; ranks with a part of the parameters need less."""
    device = torch.device("cpu")
    with torch.device("meta"):
        module = nn.Linear(2**20, get_device_memory(device) // 2**22 * 3 // 2, bias=False)
    with pytest.raises(UserError, match=r"the parameters of this rank take .*B, and its device, cpu, has .*B; use a"):
        check_parameters_fit_device([module], 1, device)
    check_parameters_fit_device([module], 2, device)
