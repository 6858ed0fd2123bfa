"""Exports from folders with more than a text model: other files and keys, vision towers, multi-token prediction."""

import json
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from drawloom import Recipe
from drawloom.components.export.adapter import AdapterExport
from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.model.auto import FAMILIES, AutoModel
from drawloom.components.model.deepseek_v3 import DeepseekV3
from drawloom.components.weights.load import StackedExperts
from support.adapted import OneStage, adapt, lora
from support.families import small
from support.qwen3 import SPARSE_SIZES, cpu_kernels, logits_of, one_document, whole
from support.tensor_sources import InMemoryTensors

TEXT: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "pad_token_id": None,
    "eos_token_id": 256,  # as the tokenizer's
}
DELTA: dict[str, Any] = {
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 8,
}
LATENT = {
    "model_type": "kimi_k2",
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
TOWER = {"hidden_size": 16, "intermediate_size": 20, "patch_size": 4}
DEEP = TOWER | {"depth": 1, "num_heads": 2, "out_hidden_size": 24, "num_position_embeddings": 16}
TIED = {"tie_word_embeddings": True}
FLAT = TOWER | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": TEXT | {"query_pre_attn_scalar": 8}, "vision_config": FLAT, "mm_tokens_per_image": 4},
    "qwen3_5": {"text_config": TEXT | DELTA | TIED, "vision_config": DEEP, **TIED},
    "qwen3_5_moe": {"text_config": TEXT | DELTA | EXPERTS, "vision_config": DEEP},
    "kimi_k25": {
        "text_config": {key: value for key, value in TEXT.items() if key != "head_dim"} | LATENT,
        "vision_config": TOWER
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4},
        "projection_hidden_size": 16,
        "tie_word_embeddings": False,
    },
}


@attrs.frozen
class LoadedStage(OneStage):
    """A whole model with weights from a folder."""

    initial_folder: Path | None = None


@attrs.frozen
class FakeTokenizer:
    """Chat tokenizer that writes one file; ids of control tokens are their texts."""

    eos_id: int = 5
    vocab_size: int = 29
    chat_templates: dict[str, str] = attrs.field(factory=dict)
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    special_tokens_by_name: dict[str, str] = attrs.field(factory=lambda: {"bos_token": "3", "pad_token": "6"})
    control_tokens: tuple[str, ...] = ("3", "5", "6")

    def encode(self, text: str) -> Any:
        raise NotImplementedError

    encode_batch = decode = token_byte_counts = decode_with_control_tokens = encode

    def encode_with_control_tokens(self, text: str) -> list[int]:
        return [int(text)]

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text('{"of": "the run"}')


def read_ids(config: Any) -> list[Any]:
    """Return the begin, end and padding ids of a config."""
    return [config.bos_token_id, config.eos_token_id, config.pad_token_id]


@pytest.mark.parametrize("kind", dict.fromkeys(FAMILIES.values()), ids=lambda kind: kind.model_type)
def test_transformers_reads_the_ids_of_the_tokenizer_and_of_the_base(kind: Any, tmp_path: Path) -> None:
    """No default of a class in transformers comes in; a base keeps its ids and keys, and learns the run's end."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds: Any = AutoModelForCausalLM
    sizes = SPARSE_SIZES | {"num_key_value_heads": 4}
    if kind.model_type == "olmo_hybrid":  # transformers requires a layer with attention
        sizes |= {"layer_types": ["linear_attention", "full_attention"]}
    model = small(kind, **{key: size for key, size in sizes.items() if key in kind.keys})
    module = whole(model)
    tokenizer: Any = FakeTokenizer()
    assert read_ids(AutoConfig.for_model(**model.hugging_face_config())) == [None, None, None]
    write_hugging_face_folder(tmp_path / "base", model, OneStage(module), tokenizer)
    assert read_ids(AutoConfig.from_pretrained(tmp_path / "base")) == [3, 5, 6]
    path, own = tmp_path / "base/config.json", {"own_key": 1, "quantization_config": {"a": 1}}
    ids = {"bos_token_id": 7, "eos_token_id": [0, 2], "pad_token_id": 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | ids | own))
    (tmp_path / "base/generation_config.json").write_text('{"eos_token_id": 2, "top_k": 9}')
    longer = kind(kernels=cpu_kernels(), config=path, max_position_embeddings=999)
    write_hugging_face_folder(tmp_path / "export", longer, LoadedStage(module, initial_folder=path.parent), tokenizer)
    loaded = kinds.from_pretrained(tmp_path / "export")
    config, generation = loaded.config, loaded.generation_config
    assert read_ids(config) == [7, [0, 2, 5], 2] and generation.eos_token_id == [2, 5] and generation.top_k == 9
    assert config.own_key == 1 and config.max_position_embeddings == 999
    assert not hasattr(config, "quantization_config")


def test_every_file_of_a_base_is_kept_written_or_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Settings and code are copied, tokenizer files only beside the same tokenizer, and all others are in the log."""
    model = small(FAMILIES["qwen3"])
    module = whole(model)
    write_hugging_face_folder(tmp_path / "base", model, OneStage(module), dtype=torch.bfloat16)
    kept = {"generation_config.json", "preprocessor_config.json", "modeling_own.py", "LICENSE", "1_Pooling/config.json"}
    of_tokenizer = {"merges.txt", "additional_chat_templates/tool_use.jinja"}
    dropped = {"optimizer.pt", "pytorch_model.bin", "onnx/model.onnx"}
    for name in {"tokenizer.json", ".cache/x", *kept, *of_tokenizer, *dropped}:
        (tmp_path / "base" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "base" / name).write_text('{"of": "the base"}')
    stages = LoadedStage(module, initial_folder=tmp_path / "base")
    caplog.set_level(logging.INFO)
    run_tokenizer: Any = FakeTokenizer()
    for tokenizer, expected in ((None, {*kept, *of_tokenizer}), (run_tokenizer, kept)):
        caplog.clear()
        target = tmp_path / f"export{len(expected)}"
        write_hugging_face_folder(target, model, stages, tokenizer)
        names = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
        assert names == {"config.json", "model.safetensors", "tokenizer.json", *expected}
        named = ", ".join(sorted({*dropped, *of_tokenizer} - expected))
        assert caplog.messages == [
            f"the export has no copies of these files in {tmp_path / 'base'}: {named}",
            f"the export is in float32, as trained, and {tmp_path / 'base'} in bfloat16; "
            'dtype = "bfloat16" in [export] writes that',
        ]
    (tmp_path / "base/tokenizer.json").write_text('{"of": "the run"}')
    write_hugging_face_folder(tmp_path / "same", model, stages, run_tokenizer, dtype=torch.bfloat16)
    assert (tmp_path / "same/merges.txt").is_file()
    assert len([line for line in caplog.messages if "float32" in line]) == 1


def write_multimodal(kind: str, folder: Path, is_old: bool) -> Any:
    """Write a small multimodal folder, and return its model in transformers."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    kinds: Any = AutoModelForImageTextToText
    torch.manual_seed(0)
    model = kinds.from_config(AutoConfig.for_model(kind, **KINDS[kind]), attn_implementation="eager").eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if is_old:  # names in files of transformers 4
        tensors = {
            name.replace("model.language_model.", "language_model.model.").replace("model.vision", "vision"): tensor
            for name, tensor in tensors.items()
        }
    if kind == "qwen3_5_moe":  # published folders have stacked experts
        parts = [f"{n}.mlp.experts.{part}" for n in (0, 1) for part in ("gate_up_proj", "down_proj")]
        stacked = StackedExperts(InMemoryTensors(tensors), [f"model.language_model.layers.{part}" for part in parts])
        tensors = {name: stacked.tensor(name) for name in stacked.specs()}
    if kind == "kimi_k25":  # transformers 5.23 writes names of its vision tower in the text model, too
        tensors = {name.replace("model.blocks.", "model.layers."): tensor for name, tensor in tensors.items()}
        for n in (0, 1):
            del tensors[f"language_model.model.layers.{n}.self_wqkv.weight"]
            queries = f"layers.{n}.self_attn.q_proj.weight"
            tensors[f"language_model.model.{queries}"] = model.state_dict()[f"model.language_model.{queries}"]
    if kind.startswith("qwen"):
        tensors["mtp.fc.weight"] = torch.randn(3, 4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"size": 8}\n')
    return model


def export(folder: Path, path: Path, *words: str, factor: float = 1.0) -> dict[str, Any]:
    """Export a folder's model as a run does, with weights times a factor, and return our logits."""
    model = {"use": "model.auto", "path": str(path)}
    run = {"name": "small", "folder": str(folder), "seed": 5}
    recipe = Recipe.load("first_run", "device.kind=cpu", *words).with_values({"model": model, "run": run})
    with recipe.open(["stages", "export"]) as objects:
        stages = objects["stages"]
        with torch.no_grad():
            for _, parameter in stages.named_parameters():
                parameter.mul_(factor)
            tokens = torch.arange(12).view(2, 6)
            logits = logits_of(stages.local[0].module, tokens, one_document(2, 6))
        objects["export"].run_after_training(1)
    return {"tokens": tokens, "logits": logits}


@pytest.mark.parametrize(
    ("kind", "is_old"),
    [("gemma3", False), ("gemma3", True), ("qwen3_5", False), ("qwen3_5_moe", False), ("kimi_k25", False)],
)
def test_text_part_of_a_multimodal_folder_is_trained_and_all_else_is_kept(
    kind: str, is_old: bool, tmp_path: Path
) -> None:
    """Logits are the multimodal model's; an export has all tensors and keys, and changes the trained ones only."""
    from transformers import AutoModelForImageTextToText

    kinds: Any = AutoModelForImageTextToText
    reference = write_multimodal(kind, tmp_path / "base", is_old)
    before = load_file(tmp_path / "base/model.safetensors")
    run = export(tmp_path / "same", tmp_path / "base")
    with torch.no_grad():
        torch.testing.assert_close(run["logits"], reference(run["tokens"]).logits, rtol=1e-4, atol=1e-5)
    same = load_file(tmp_path / "same/export/model.safetensors")
    assert same.keys() == before.keys() and all(torch.equal(same[name], before[name]) for name in same)
    for name in ("config.json", "preprocessor_config.json"):
        assert json.loads((tmp_path / "same/export" / name).read_text()) == json.loads(
            (tmp_path / "base" / name).read_text()
        )
    run = export(tmp_path / "other", tmp_path / "same/export", "precision.parameter=float32", factor=1.1)
    after = load_file(tmp_path / "other/export/model.safetensors")
    kept = ("visual", "vision_tower", "multi_modal_projector", "mm_projector", "mtp.")
    assert {name for name in after if torch.equal(after[name], before[name])} == {
        name for name in before if any(part in name for part in kept) or not before[name].any()
    }
    loaded = kinds.from_pretrained(tmp_path / "other/export", attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(loaded(run["tokens"]).logits, run["logits"], rtol=1e-4, atol=1e-5)


def test_layers_for_multi_token_prediction_are_kept(tmp_path: Path) -> None:
    """An export has the layer that the model lacks, and its key in the config, as long as the folder is there."""
    sizes = SPARSE_SIZES | {"num_key_value_heads": 4, "q_lora_rank": 0, "kv_lora_rank": 9}
    model = small(DeepseekV3, **sizes)
    module = whole(model)
    write_hugging_face_folder(tmp_path / "base", model, OneStage(module))
    path, extra = tmp_path / "base" / "model.safetensors", {"model.layers.2.enorm.weight": torch.ones(24)}
    save_file(load_file(path) | extra, path)
    config = json.loads((tmp_path / "base/config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    stages = LoadedStage(module, initial_folder=tmp_path / "base")
    write_hugging_face_folder(tmp_path / "same", model, stages)
    assert json.loads((tmp_path / "same/config.json").read_text()) == config
    exported = load_file(tmp_path / "same/model.safetensors")
    assert torch.equal(exported["model.layers.2.enorm.weight"], torch.ones(24))
    (tmp_path / "base").rename(tmp_path / "gone")
    write_hugging_face_folder(tmp_path / "without", model, stages)
    assert "model.layers.2.enorm.weight" not in load_file(tmp_path / "without/model.safetensors")


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_adapters_load_over_the_multimodal_folder(kind: str, tmp_path: Path, one_rank: Any) -> None:
    """Names equal those in transformers' model for causal language modeling, which PEFT adapts."""
    write_multimodal(kind, tmp_path / "origin", is_old=False)
    model = AutoModel(kernels=cpu_kernels(), path=tmp_path / "origin")
    adapters = (
        lora("q_proj", "layers.1.mlp.up_proj", "in_proj_qkv") if kind == "qwen3_5" else lora("q_proj", "0.*.o_proj"),
    )
    stages: Any = LoadedStage(adapt(model, *adapters), adapters, tmp_path / "origin")  # type: ignore[arg-type]
    write_hugging_face_folder(tmp_path / "base", model, LoadedStage(adapt(model), (), tmp_path / "origin"))  # type: ignore[arg-type]
    mesh: Any = SimpleNamespace(world=one_rank.world)
    folder: Any = SimpleNamespace(folder=tmp_path)
    AdapterExport(model=model, stages=stages, folder=folder, mesh=mesh).run_after_training(1)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        ours = logits_of(stages.module, tokens, one_document(2, 6))
        torch.testing.assert_close(
            load_adapted(tmp_path / "base", tmp_path / "adapter", tokens), ours, rtol=1e-4, atol=2e-5
        )


def load_adapted(base: Path, adapter: Path, tokens: torch.Tensor) -> Any:
    """Return the logits of PEFT's model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    kinds: Any = AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers' own deprecations
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        model: Any = PeftModel.from_pretrained(kinds.from_pretrained(base, attn_implementation="eager"), adapter)
    return model.eval()(tokens).logits
