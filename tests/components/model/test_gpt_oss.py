"""gpt-oss against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.model.decoder.rope import RopeScaling
from drawloom.components.model.gpt_oss import GptOss
from drawloom.components.ports.model import LayerRange
from support.adapted import OneStage
from support.families import (
    assert_all_projections_are_adapted,
    assert_equal_to_transformers,
    assert_files_go_both_ways,
    assert_generated_as_whole_texts,
    assert_operations_equal_the_count_of_torch,
    small,
)
from support.qwen3 import SIZES, whole
from support.versions import needs_transformers
from support.weight_folders import fill_module_from_folder

YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, truncate=False)
EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 12,
    "router_aux_loss_coef": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "defaults": EXPERTS,
    "every flag": EXPERTS
    | {
        "num_experts_per_tok": 3,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 4,
        "attention_bias": False,
        "swiglu_alpha": 0.9,
        "swiglu_limit": 0.4,
        "rope_scaling": YARN,
        "tie_word_embeddings": True,
    },
}


def gpt_oss(kind: str, **changes: Any) -> GptOss:
    return small(GptOss, **SIZES | KINDS[kind] | changes)  # type: ignore[return-value]


@needs_transformers("5.23")
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_equal_those_of_transformers(kind: str) -> None:
    """Logits, packed documents' losses and gradients, also for sinks and biases, equal transformers'."""
    assert_equal_to_transformers(gpt_oss(kind))


@needs_transformers("5.23")
@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    """transformers and drawloom read each other's folders."""
    assert_files_go_both_ways(gpt_oss(kind), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_text_have_its_logits(kind: str) -> None:
    """Generation token by token equals the whole text, operations are counted, and LoRA finds all projections."""
    assert_generated_as_whole_texts(gpt_oss(kind))
    choices = KINDS[kind]["num_experts_per_tok"]
    # Two layers' choices, gate and up with 12 channels each, and down, over 22 tokens.
    assert_operations_equal_the_count_of_torch(gpt_oss(kind), 22 * 2 * choices * 2 * 3 * 24 * 12)
    assert_all_projections_are_adapted(gpt_oss(kind))


def test_experts_in_mxfp4_are_read_like_transformers(tmp_path: Path) -> None:
    """Blocks and scales become the bfloat16 weights of transformers' conversion."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # takes a second, also in other tests

    model = gpt_oss("defaults", hidden_size=32, intermediate_size=32)
    write_hugging_face_folder(tmp_path / "packed", model, OneStage(whole(model)))
    path = tmp_path / "packed" / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(0)
    wanted = {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(117, 130, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wanted[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, path)
    module = model.build(LayerRange(0, 2, embedding=True, head=True))
    fill_module_from_folder(tmp_path / "packed", module, model.hugging_face_mapper().inverse())
    write_hugging_face_folder(tmp_path / "plain", model, OneStage(module))
    read = load_file(tmp_path / "plain" / "model.safetensors")
    for name, tensor in wanted.items():
        assert torch.equal(read[name], tensor.float()), name
