"""Fine-tuning small folders from all families, loaded back in transformers and PEFT."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom import Recipe
from support.chat import tokenizer_folder
from support.family_words import FAMILY_SIZES, FAMILY_WORDS, PEFT_TARGETS
from support.runs import drawloom, rows

ROOT = Path(__file__).parents[2]
SMALL = ("trainer.steps=2", "batch.global_size=2", "batch.micro_size=2", "validation.rows_used=2", "device.kind=cpu")


def logits_in_transformers(base: Path, adapter: Path | None, tokens: torch.Tensor) -> Any:
    """Return a folder's logits in transformers, with an adapter in PEFT if there is one."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    kinds: Any = AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's and transformers' own
        warnings.filterwarnings("error", "Found missing adapter keys")
        model = kinds.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILY_WORDS)
def test_fine_tuned_folders_load_in_other_libraries(family: str, tmp_path: Path) -> None:
    """Merged LoRA exports have the logits that PEFT computes over the base, and full tuning changes logits."""
    tokenizer = {"use": "data.hugging_face_tokenizer", "path": str(tokenizer_folder(tmp_path / "tokenizer"))}
    words = (*FAMILY_SIZES, *FAMILY_WORDS[family], "vars.length=64", "device.kind=cpu")
    values: dict[str, Any] = {"run": {"name": "base", "folder": str(tmp_path / "base")}, "tokenizer": tokenizer}
    with Recipe.load("first_run", *words).with_values(values).open(only="export") as objects:
        objects["export"].run_after_training(1)
    base, tokens = tmp_path / "base/export", torch.arange(3, 15).view(2, 6)
    before = logits_in_transformers(base, None, tokens)
    for recipe, more in (
        ("finetune", (f'corpus.paths=["{ROOT}/components/data/*.py"]', "vars.length=32", "optimizer.lr=0.01")),
        ("finetune_lora", (f'corpus.paths=["{ROOT}/components/data/*.py"]', "vars.length=32", "optimizer.lr=0.01")),
        (
            "chat",
            (f'tokens.paths=["{ROOT}/docs/examples/conversations.jsonl"]', "vars.length=128", "optimizer.lr=0.01"),
        ),
    ):
        targets = f'adapters.lora.targets=["{PEFT_TARGETS.get(family, "*_proj")}"]'
        lora = () if recipe == "finetune" else (targets,)
        [outcome] = drawloom(tmp_path, "run", recipe, f"vars.base={base}", *SMALL, *more, *lora)
        assert outcome.code == 0, (recipe, outcome.text)
        run = tmp_path / "runs" / recipe
        assert len(rows(run)) == 2
        after = logits_in_transformers(run / "export", None, tokens)
        assert float((after - before).abs().max()) > 1e-4, recipe
        if recipe != "finetune":
            adapted = logits_in_transformers(base, run / "adapter", tokens)
            torch.testing.assert_close(adapted, after, rtol=1e-3, atol=1e-4)
