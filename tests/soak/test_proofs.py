"""Proofs: seeded faults, shipped components, and the documents' examples."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.proving.prover import Prover
from drawloom.components.proving.run import Subject
from support.blocks import ROOT, read_files
from support.chat import tokenizer_folder
from support.mesh_faults import FAULTS, SeededFault, prove_with
from support.proofs import SHIPPED

pytestmark = pytest.mark.soak

EXAMPLES = ("focal", "soft_clip", "inverse_sqrt", "lion", "repeats", "counted", "clip_embedding", "parallel_lm")
BUDGET = 30.0
LORA = (
    *("adapter.targets=['*_proj', 'embed_tokens']", "tuned.use=adapters.full_tuning", "tuned.targets=['norm']"),
    *("stages.adapters=['@adapter', '@tuned']", "peft.use=export.adapter", "trainer.on_finish=['@export', '@peft']"),
)
ROUTERS = (
    *("model.num_experts=8", "model.n_group=2", "model.topk_group=1", "model.tie_word_embeddings=true"),
    *("model.router_z_loss_coef=1e-2", "model.router_aux_loss_coef=1e-2", "metrics.experts.use=metrics.expert_load"),
    *("metrics.experts.by_expert=true", "router_bias.use=phases.router_bias", "router_bias.update_rate=0.02"),
    'edit.trainer.phases.after."@optimizer"=@router_bias',
)
CHAT = (
    *("model.use=model.qwen3.dense", "model.num_hidden_layers=4", "model.hidden_size=16", "model.head_dim=8"),
    *("model.num_attention_heads=4", "model.num_key_value_heads=2", "model.intermediate_size=24"),
    *("adapters.lora.targets=['*_proj']", "adapters.lora.rank=2", "adapters.lora.alpha=32.0"),
    *("optimizer.lr=3e-2", "run.seed=2"),
)
SHARDS, PIPELINE, REPLICAS = "data_shard = 2", "pipeline = 2", "data_replicate = 2"
NARROW = "tensor = 2, bfloat16", "context = 2, bfloat16"
OTHER_SIZE = "microbatches of another size"
TENSORS, CONTEXTS, EXPERTS = "data_shard = 2, tensor = 2", "data_shard = 2, context = 2", "data_shard = 4, expert = 2"
CASES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("loss.next_token",): (
        *(SHARDS, "one process, resumed from data_shard = 2", "one process, resumed from tensor = 2"),
        "one process, resumed from data_shard = 2, expert = 2",
    ),
    ("model.lfm2",): (CONTEXTS,),
    ("model.gpt_oss",): (TENSORS, CONTEXTS, EXPERTS),
    ("model.qwen3_5",): (CONTEXTS,),
    ("model.qwen3_next",): (TENSORS, EXPERTS),
    ("model.deepseek_v3",): (TENSORS, EXPERTS),
    ("model.gemma4",): (TENSORS, CONTEXTS),
    ("model.kimi_linear",): (TENSORS, CONTEXTS),
    ("model.pattern", "model.residual=hyper"): NARROW,
    ("model.pattern", "model.residual=constrained"): NARROW,
    ("model.pattern", "model.layers=kda, attention"): NARROW,
    ("adapters.lora", *LORA): (SHARDS, REPLICAS, "pipeline = 2, zero_bubble_1p", TENSORS),
    ("adapters.lora", "adapter.targets=['lm_head', 'q_proj']", "model.tie_word_embeddings=true"): (
        PIPELINE,
        "tensor = 2",
    ),
    ("model.dots1", *ROUTERS): ("tensor = 2", "context = 2", "data_shard = 2, expert = 2", OTHER_SIZE),
    ("kto", *CHAT, "loss.beta=0.5"): (PIPELINE, REPLICAS, OTHER_SIZE),
    ("reward", *CHAT): (SHARDS, PIPELINE),
    ("classify", *CHAT): (SHARDS, PIPELINE),
}
"""Cases by component or recipe, with words. No other test has these components on these meshes."""


@pytest.fixture(scope="module")
def prover() -> Iterator[Prover]:
    """Return a prover, whose processes all tests share."""
    with Prover() as prover:
        yield prover


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_found_with_its_axis(fault: SeededFault, prover: Prover) -> None:
    """A fault reported for a training framework makes a difference, on a mesh with its axis."""
    result = prove_with(fault, prover)
    assert result.difference is not None, result.render("text")
    assert any(axis in result.failed for axis in fault.axes), result.render("text")


@pytest.mark.parametrize("use", SHIPPED)
def test_a_shipped_component_is_like_one_process(use: str, prover: Prover) -> None:
    """There is no alarm for a shipped component, on as many meshes as half a minute allows."""
    result = prover.prove(Subject(use), BUDGET)
    assert result.exit_code == 0 and len(result.equal) > 1, result.render("text")


@pytest.mark.parametrize("subject", CASES, ids=" ".join)
def test_a_case_is_like_one_process(subject: tuple[str, ...], prover: Prover, tmp_path: Path) -> None:
    """Losses, gradients, weights, metrics and exports of these meshes are one process's."""
    name, *words = subject
    texts = [(number, "ab" * (1 + number % 3), "c" * (1 + number % 5)) for number in range(40)]
    lines: dict[str, list[dict[str, Any]]] = {
        "reward": [{"prompt": text, "chosen": answer, "rejected": text} for _, text, answer in texts],
        "kto": [{"prompt": text, "completion": answer, "label": n % 2 == 0} for n, text, answer in texts],
        "classify": [{"text": text, "label": ("negative", "positive")[n % 2]} for n, text, _ in texts],
    }
    if name in lines:
        (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines[name])), "utf-8")
        words += [f"vars.base={tokenizer_folder(tmp_path / 'base')}", f'tokens.paths=["{tmp_path}/lines.jsonl"]']
    result = prover.prove(Subject(name, words), None, CASES[subject])
    assert result.exit_code == 0 and {*CASES[subject]} <= {*result.equal}, result.render("text")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_in_the_documents_is_like_one_process(
    name: str, prover: Prover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The components for readers to copy are right on every mesh."""
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "__init__.py").touch()
    for page in ("components.md", "proving.md"):
        for file, text in read_files(ROOT / "docs" / page).items():
            if file.startswith("my_lab/") and file.endswith(".py"):
                (tmp_path / file).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sizes = ["model.width=16", "model.heads=2"] if name == "parallel_lm" else []
    result = prover.prove(Subject(f"my_lab.{name}", sizes, imports=["my_lab"]), BUDGET)
    assert result.exit_code == 0 and len(result.equal) > 1, result.render("text")
