"""Runs with float32 masters whose layers compute in bfloat16."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.runs import drawloom, rows, series, write_corpus

LEARNED = ("step", "loss", "grad_norm", "lr")
EXPERTS = """
[model]
use = "model.qwen3.moe"
num_hidden_layers = 2
hidden_size = 16
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
tie_word_embeddings = true
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 16
"""
MODELS = {"dense": "[model]\nnum_hidden_layers = 2\n", "experts": EXPERTS}
UNCAST = {"dense": '"*norm.weight"', "experts": '"*norm.weight", "*.mlp.gate.weight"'}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with the recipe of a dense model or of a model with experts."""
    write_corpus(tmp_path)
    (tmp_path / "mixed.toml").write_text(
        'extends = "./tiny.toml"\n[precision]\ncompute = "bfloat16"\n'
        f"uncast = [{UNCAST[request.param]}]\n{MODELS[request.param]}\n"
        "[lr]\nstart = 1.0\nphases = [{ to = 1.0, steps = 1 }]\n",
        "utf-8",
    )
    yield tmp_path


def test_a_resumed_run_has_the_same_bits(folder: Path) -> None:
    """A resumed run has the losses of an uninterrupted run, and float32 master weights are saved and exported."""
    common = ["run", "mixed.toml", "evaluate.every=2", "trainer.on_finish=['@export']"]
    for steps in (2, 5):
        [outcome] = drawloom(folder, *common, f"trainer.steps={steps}", "run.name=parts", "--accept-changes")
        assert outcome.code == 0, outcome.text
    assert drawloom(folder, *common, "trainer.steps=5", "run.name=whole")[0].code == 0
    parts, whole = folder / "runs/parts", folder / "runs/whole"
    assert series(parts, *LEARNED) == series(whole, *LEARNED)
    assert rows(whole)[-1]["validation_loss"] == rows(parts)[-1]["validation_loss"]
    exported = load_file(whole / "export/model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
    weight = exported["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(weight, weight.bfloat16().float()), "exported weights were rounded"


@pytest.mark.soak
def test_ranks_have_the_losses_of_one_process(folder: Path) -> None:
    """Two replicas, and two pipeline stages, have the losses of one process up to rounding in bfloat16."""
    common = ["run", "mixed.toml", "trainer.steps=4", "trainer.on_finish=[]", "batch.micro_size=2"]
    layouts = {"one": (1, ""), "replicas": (2, "mesh.pipeline=1"), "stages": (2, "mesh.pipeline=2")}
    losses = {}
    for name, (ranks, word) in layouts.items():
        outcomes = drawloom(folder, *common, f"run.name={name}", *filter(None, [word]), ranks=ranks)
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
        losses[name] = series(folder / "runs" / name, "loss")
    for name in ("replicas", "stages"):
        for (one,), (other,) in zip(losses["one"], losses[name], strict=True):
            assert other == pytest.approx(one, rel=2e-3)


def test_a_pattern_without_a_parameter_is_refused(tmp_path: Path) -> None:
    """A misspelt pattern of parameters that are not cast is refused, because it would go unnoticed."""
    write_corpus(tmp_path)
    words = ("run", "tiny.toml", "precision.compute=bfloat16", 'precision.uncast=["*nrom.weight"]')
    [outcome] = drawloom(tmp_path, *words)
    assert outcome.code == 2 and "no parameter is called '*nrom.weight'" in outcome.text
    assert "Traceback" not in outcome.text
