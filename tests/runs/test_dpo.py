"""DPO against TRL: the same base, adapter and pairs."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.ports.pipeline import sum_losses
from drawloom.graph.project import Recipe
from support.chat import tokenizer_folder
from support.observers_of_runs import TINY
from support.steps import train

ROOT = Path(__file__).parents[2]
PAIRS = ROOT / "docs/examples/preferences.jsonl"
TARGETS = ["q_proj", "v_proj", "down_proj"]
PEFT = {"lora_A": "lora_A.default.weight", "lora_B": "lora_B.default.weight"}


@attrs.frozen
class Found:
    """The mean loss of all pairs, the gradients of the adapter's parameters, and their values, by our names."""

    loss: float
    gradients: dict[str, Tensor]
    adapter: dict[str, Tensor]


def base(folder: Path) -> Path:
    """A tiny model of random weights whose tokenizer has a chat template."""
    tokenizer = {"use": "data.hugging_face_tokenizer", "path": str(tokenizer_folder(folder / "tokenizer"))}
    values: dict[str, Any] = {"model": TINY | {"tie_word_embeddings": False, "initializer_range": 0.3}}
    values |= {"run": {"name": "base", "folder": str(folder / "base")}, "tokenizer": tokenizer}
    with Recipe.load("first_run").with_values(values).open(only="export") as objects:
        objects["export"].finish(1)
    return folder / "base/export"


def ours(folder: Path, path: Path) -> tuple[Found, list[tuple[Tensor, Tensor]]]:
    """A step of the recipe, with random values in the adapter; ids and weights of each document, pair by pair."""
    given = (f"vars.base={path}", f'tokens.paths=["{PAIRS}"]', "tokens.validation_fraction=0.0", "loss.beta=0.5")
    words = (*given, f"run.folder={folder / 'run'}", f"adapters.lora.targets={json.dumps(TARGETS)}")
    with Recipe.load("dpo", *words).open(["executor", "packing"]) as objects:
        named = dict(objects["stages"].named_parameters())
        generator = torch.Generator().manual_seed(1)
        for parameter in named.values():
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
        rows = objects["packing"]
        state = train(objects["executor"], [rows.batch("train", range(rows.count("train")))])
        total, weight = sum_losses(state)
        gradients = {name: each.grad / weight for name, each in named.items() if each.grad is not None}
        documents = objects["tokens"].documents("train")
        texts = [documents.read(number, 0, length) for number, length in enumerate(documents.lengths)]
        pairs = [(torch.tensor(text.ids.astype("int64")), torch.tensor(text.weights > 0)) for text in texts]
        values = {name: each.detach().clone() for name, each in named.items()}
        return Found(float(total / weight), gradients, values), pairs


def theirs(folder: Path, path: Path, adapter: dict[str, Tensor], pairs: list[tuple[Tensor, Tensor]]) -> Found:
    """What TRL's trainer computes, with PEFT's LoRA, of a batch of all chosen answers before all rejected ones."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path),
        args=trl.DPOConfig(str(folder / "trl"), beta=0.5, report_to=[], use_cpu=True, bf16=False, save_strategy="no"),
        train_dataset=datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=AutoTokenizer.from_pretrained(path),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM"),
    )
    named = {_our_name(name): each for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert named.keys() == adapter.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(adapter[name])
    ordered = pairs[0::2] + pairs[1::2]

    def padded(column: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([each[column] for each in ordered], batch_first=True)

    lengths = torch.tensor([len(ids) for ids, _ in ordered])
    inputs = {"input_ids": padded(0), "completion_mask": padded(1).long()}
    inputs["attention_mask"] = (torch.arange(inputs["input_ids"].shape[1]) < lengths[:, None]).long()
    loss = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    loss.backward()
    return Found(float(loss), {name: each.grad for name, each in named.items()}, adapter)


def _our_name(name: str) -> str:
    for leaf, peft in PEFT.items():
        name = name.replace(peft, leaf)
    return name.removeprefix("base_model.model.")


@pytest.mark.soak  # importing TRL and its trainer takes 15 s
@pytest.mark.filterwarnings("ignore")  # those of TRL and its packages
def test_loss_and_every_gradient_are_those_of_trl(tmp_path: Path) -> None:
    """All pairs that the repository ships, packed here and padded there."""
    path = base(tmp_path)
    found, pairs = ours(tmp_path, path)
    wanted = theirs(tmp_path, path, found.adapter, pairs)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5) and abs(found.loss - 0.6931) > 0.05
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
