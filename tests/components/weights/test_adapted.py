"""Models with adapters; the adapters themselves are tested in tests/components/adapters."""

import pytest
import torch

from drawloom.components.ports.slices import ModelParameter
from drawloom.components.ports.stages import adapter_parameter_names
from drawloom.components.ports.weights import Mapper, TensorGroup
from drawloom.components.weights.adapted import (
    build_meta_model_with_adapters,
    freeze_adapt_and_list_targets,
    gather_and_measure_rounding_loss,
    make_merge_mapper,
    materialize_and_initialize_adapters,
)
from support.adapted import fill_from_seed, lora
from support.qwen3 import dense, whole


def test_without_adapters_nothing_is_frozen() -> None:
    """A model is trained whole if no adapter is named."""
    module = whole(dense())
    assert freeze_adapt_and_list_targets([], module) == set() and all(
        parameter.requires_grad for parameter in module.parameters()
    )
    assert adapter_parameter_names(module) == set()


def test_initial_values_follow_from_seed_and_name() -> None:
    """The same seed gives the same factors, also when other layers are adapted beside; another seed gives others."""

    def factor(seed: int, *targets: str) -> torch.Tensor:
        module = build_meta_model_with_adapters(dense(), [lora(*targets)]).to_empty(device="cpu")
        materialize_and_initialize_adapters(module, torch.device("cpu"), fill_from_seed(seed))
        return dict(module.named_parameters())["model.layers.1.self_attn.q_proj.lora_A"].detach()

    assert torch.equal(factor(1, "q_proj"), factor(1, "*_proj"))
    assert not torch.equal(factor(1, "q_proj"), factor(2, "q_proj"))


def test_merging_keeps_the_names_of_all_but_the_adapters() -> None:
    """Merged weights have the frozen weights' names; a tied head becomes a separate weight."""
    module = build_meta_model_with_adapters(dense(tie_word_embeddings=True), [lora("embed_tokens", "q_proj")])
    mapper = make_merge_mapper(module, tied=True)
    assert set(mapper.inputs) - set(mapper.outputs) == adapter_parameter_names(module)
    assert "lm_head.weight" in mapper.outputs and "lm_head.weight" not in make_merge_mapper(module, tied=False).outputs


def test_the_error_of_merging_is_the_rounded_off_change() -> None:
    """1 + 2^-9 has no bfloat16: the change is lost whole; 1 + 2^-7 has one."""
    mapper = Mapper((TensorGroup(("w", "d"), ("w",), lambda tensors: [tensors[0] + tensors[1]]),))
    for change, lost in ((2.0**-9, 1.0), (2.0**-7, 0.0)):
        parameters = {"w": ModelParameter(torch.ones(3)), "d": ModelParameter(torch.full((3,), change))}
        assert gather_and_measure_rounding_loss(
            mapper, parameters, torch.bfloat16
        ).relative_rounding_loss == pytest.approx(lost)
        assert gather_and_measure_rounding_loss(mapper, parameters, None).relative_rounding_loss == 0.0
