"""Fine-tuning of small folders of every family, as transformers and PEFT see the results."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.transformers_types import default_config
from drawloom.components.model.auto import FAMILIES
from drawloom.components.model.fallback.build import build_transformers_model
from drawloom.components.model.fallback.checks import shrink_config
from support.chat import tokenizer_folder
from support.family_words import PEFT_TARGETS
from support.runs import drawloom

ROOT = Path(__file__).parents[2]
TEXT = f'corpus.paths=["{ROOT}/components/data/chat/*.py"]'
CONVERSATIONS = f'tokens.paths=["{ROOT}/docs/examples/conversations.jsonl"]'
SMALL = ("trainer.steps=2", "batch.global_size=2", "batch.micro_size=2", "validation.rows_used=2", "data.workers=0")
FALLBACKS = {"gemma2": "*_proj", "gpt2": "", "phi": "dense", "starcoder2": "*_proj", "cohere": "*_proj"}
"""Types without a family, and the pattern of their projections; GPT-2 has none that LoRA adapts."""

HEAD_DIM_IN_FILES = ("glm4_moe", "qwen3_moe")
"""Types whose released models have a head_dim that is not transformers' default."""

UNPUBLISHED = {
    "olmo_hybrid": "its default config has rotary positions and sizes that no released model has",
    "kimi_linear": "it saves dense layers under the experts' names, and released files have others",
}
"""Types whose folders transformers writes unlike released ones, and why."""


def folder_of(model_type: str, folder: Path) -> Path:
    """Write a small random model in transformers, with a tokenizer, and return its folder."""
    torch.manual_seed(0)
    tokenizer_folder(folder)
    config = shrink_config(default_config(model_type))
    values = config.to_dict()
    dropout = {key: 0.0 for key in values if key.endswith(("dropout", "pdrop"))}
    ids = {"vocab_size": 306, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    if model_type.startswith("gemma4"):
        ids |= {"vocab_size_per_layer_input": 306, "pad_token_id": 0}  # transformers' multimodal models look it up
    width = {"head_dim": 16} if model_type in HEAD_DIM_IN_FILES else {}
    if "text_config" in values:
        values["text_config"] |= ids
    model = build_transformers_model(type(config).from_dict(values | dropout | ids | width), "eager", experts="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    """Return transformers' model of a folder with all weights and no others."""
    from transformers import AutoModelForCausalLM

    kinds: Any = AutoModelForCausalLM
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers' own deprecations
        model, report = kinds.from_pretrained(folder, output_loading_info=True, **options)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return model.eval()


def load_with_adapter(base: Path, adapter: Path) -> Any:
    """Return PEFT's model of a base with an adapter."""
    from peft import PeftModel  # takes seconds

    model = load(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers' own deprecations
        return PeftModel.from_pretrained(model, adapter).eval()


def assert_fine_tuned(recipe: str, model_type: str, folder: Path) -> None:
    """Assert that a recipe trains a folder, whose results transformers and PEFT load, and drawloom generates from."""
    base = folder_of(model_type, folder / "base")
    data = CONVERSATIONS if recipe == "chat" else TEXT
    words = [f"vars.base={base}", data, *SMALL, f"vars.length={128 if recipe == 'chat' else 32}"]
    words += [] if model_type in FAMILIES else ["model.use=model.transformers", f"model.path={base}"]
    words += (
        []
        if recipe == "finetune"
        else [f'adapters.lora.targets=["{(FALLBACKS | PEFT_TARGETS).get(model_type, "*_proj")}"]']
    )
    [outcome] = drawloom(folder, "run", recipe, *words)
    assert outcome.code == 0, outcome.text
    run, tokens = folder / "runs" / recipe, torch.arange(3, 20)[None]
    with torch.no_grad():
        before, after = load(base)(tokens).logits, load(run / "export")(tokens).logits
        assert float((after - before).abs().max()) > 1e-5
        if recipe != "finetune":
            torch.testing.assert_close(
                load_with_adapter(base, run / "adapter")(tokens).logits, after, atol=1e-4, rtol=1e-4
            )
    prompt = ("generate", f"runs/{recipe}", "--prompt", "def", "--tokens", "5", "--temperature", "0")
    for command in (prompt, ("evaluate", f"runs/{recipe}"), ("export", f"runs/{recipe}", "--to", "again")):
        [outcome] = drawloom(folder, *command)
        assert outcome.code == 0, outcome.text
    assert (folder / "again/model.safetensors").exists()


@pytest.mark.soak
@pytest.mark.parametrize(("recipe", "model_type"), [("finetune", "gpt2"), ("chat", "gemma2")])
def test_types_of_transformers_are_fine_tuned(recipe: str, model_type: str, tmp_path: Path) -> None:
    """Types without a family are trained, exported, evaluated and sampled by all commands."""
    assert_fine_tuned(recipe, model_type, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["finetune", "finetune_lora", "chat"])
@pytest.mark.parametrize("model_type", [*FAMILIES, *FALLBACKS])
def test_every_family_is_fine_tuned(recipe: str, model_type: str, tmp_path: Path) -> None:
    """A folder of every family, by every recipe."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type not in kinds or (recipe != "finetune" and FALLBACKS.get(model_type) == ""):
        pytest.skip("transformers has no such language model, or LoRA no layer of it")
    if model_type in UNPUBLISHED:
        pytest.skip(f"transformers' {model_type}: {UNPUBLISHED[model_type]}")
    assert_fine_tuned(recipe, model_type, tmp_path)
