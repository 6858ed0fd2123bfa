"""Which layers LoRA adapts."""

from typing import Any

import pytest
import torch

from drawloom.components.adapters.full_tuning import FullTuning
from drawloom.components.ports.stages import Adapter
from drawloom.components.weights.adapted import build_meta_model_with_adapters
from drawloom.graph import UserError
from support.adapted import lora
from support.qwen3 import dense, sparse


def trained_names(*adapters: Adapter, model: Any = None) -> list[str]:
    """Return the trained parameters' names without the layer numbers."""
    module = build_meta_model_with_adapters(model or dense(), adapters)
    return sorted(name for name, parameter in module.named_parameters() if parameter.requires_grad)


def test_targets_are_names_ends_of_names_or_patterns() -> None:
    """A target matches a name from any dot on; only the matching layers' factors are trained."""
    both = [f"model.layers.{n}.self_attn.q_proj.lora_{f}" for n in (0, 1) for f in "AB"]
    assert trained_names(lora("q_proj")) == trained_names(lora("self_attn.q_*")) == both
    assert (
        trained_names(lora("layers.1.*.q_proj")) == trained_names(lora("model.layers.1.self_attn.q_proj")) == both[2:]
    )
    assert len(trained_names(lora("*_proj"))) == 2 * 7 * 2


def test_experts_are_adapted_whole_or_in_part() -> None:
    """`experts` adapts both expert parameters, and each can be named alone; routers can't be adapted."""
    both = trained_names(lora("experts"), model=sparse())
    assert both == trained_names(lora("experts.*_proj"), model=sparse()) and len(both) == 2 * 4
    assert [name for name in both if ".down_proj" in name] == trained_names(lora("experts.down_proj"), model=sparse())
    with pytest.raises(UserError, match=r"'mlp.gate' matches nothing"):
        trained_names(lora("mlp.gate"), model=sparse())


def test_scale_is_alpha_by_rank_or_by_its_root() -> None:
    """The scale is alpha / r, and with rslora alpha / sqrt(r)."""
    assert lora("q_proj").options.scale == 2.0
    assert lora("q_proj", rslora=True).options.scale == 4.0


@pytest.mark.parametrize(
    ("adapters", "text"),
    [
        ([lora("q_prj")], "'q_prj' matches nothing that can be adapted; linear layers are q_proj"),
        ([lora("norm")], "'norm' matches nothing"),
        ([lora("q_proj"), lora("layers.0.*")], "layers.0.self_attn.q_proj is named by two adapters"),
        ([lora("q_proj"), FullTuning(targets=["layers.0"])], "layers.0.self_attn.q_proj is named by two adapters"),
        ([FullTuning(targets=["layers.0"]), lora("q_proj")], "layers.0.self_attn.q_proj is named by two adapters"),
        ([lora("embed_tokens", dora=True)], "DoRA for linear layers only"),
        ([FullTuning(targets=["nrm"])], "'nrm' matches nothing"),
        ([lora("lm_head"), lora("lm_head")], "lm_head is named by two adapters"),
        ([lora("embed_tokens"), lora("lm_head")], "lm_head is tied to embed_tokens, which is adapted, too"),
        ([lora("lm_head"), FullTuning(targets=["embed_tokens"])], "model.embed_tokens is named by two adapters"),
        ([lora("lm_head", dora=True)], "DoRA does not support lm_head tied to embed_tokens; set dora = false for it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsuitable_layers_are_refused(adapters: list[Adapter], text: str) -> None:
    """One message names the layer and the reason."""
    with pytest.raises(UserError, match=text):
        trained_names(*adapters, model=dense(tie_word_embeddings=True))


@pytest.mark.parametrize("changes", [{"dropout": 0.1}, {"dora": True}])
def test_experts_have_neither_dropout_nor_dora(changes: Any) -> None:
    """PEFT could not load them."""
    with pytest.raises(UserError, match=r"mlp.experts: PEFT (supports|does not support) (DoRA|dropout)"):
        trained_names(lora("experts", **changes), model=sparse())


def test_factors_have_the_dtype_of_the_weight_and_no_memory_yet() -> None:
    """Adapters are injected on the meta device."""
    module = build_meta_model_with_adapters(dense(), [lora("*_proj")])
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
