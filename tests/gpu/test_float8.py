"""Runs in float8 on a GPU: kept weights, gathers in float8, CUDA graphs and experts."""

from pathlib import Path
from typing import Any

import pytest

from support.gpu import drawloom_run
from support.runs import series

pytestmark = pytest.mark.gpu

COMMON = (
    *("tiny.toml", "randomness.deterministic=true", "trainer.steps=6", "trainer.on_finish=[]", "batch.micro_size=2"),
    *("model.hidden_size=64", "model.head_dim=32", "model.num_attention_heads=4", "model.num_key_value_heads=2"),
    *("model.intermediate_size=128", "vars.length=128", "precision.compute=bfloat16", "float8.use=float8.training"),
)
EXPERTS = (
    *("model.use=model.qwen3.moe", "model.num_hidden_layers=2"),
    *("model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=64"),
)
MODELS = {"dense": (), "experts": EXPERTS}
QLORA = (
    *("--overlay", "with_nf4", "float8.use=float8.training", 'stages.adapters=["@lora"]', "lora.use=adapters.lora"),
    *("lora.targets=['*_proj']", "lora.rank=4", "lora.alpha=8.0"),
)


def losses_of_run(folder: Path, name: str, *words: str, processes: int = 1) -> list[tuple[Any, ...]]:
    """Run the recipe, and return the steps' losses and gradient norms."""
    outcome = drawloom_run(folder, *COMMON, f"run.name={name}", *words, processes=processes)
    assert outcome.code == 0, outcome.text
    return series(folder / "runs" / name, "loss", "grad_norm")


@pytest.mark.parametrize("model", MODELS)
def test_weights_rounded_once_a_step_change_no_bit(folder: Path, model: str) -> None:
    """
    Kept float8 weights change no bit compared with rounding in every pass, also after AdamW's launch, and CUDA graphs
    read the last update's elements.
    """
    words = MODELS[model]
    plain = losses_of_run(folder, "pass", *words)
    assert len(plain) == 6 and plain[-1][0] < plain[0][0]
    assert losses_of_run(folder, "step", *words, "float8.round_weights=step") == plain
    for rounding in ("pass", "step"):
        graphs = losses_of_run(
            folder, f"graphs_{rounding}", *words, "capture.use=pipeline.captured", f"float8.round_weights={rounding}"
        )
        for mine, other in zip(graphs, plain, strict=True):
            assert list(mine) == pytest.approx(list(other), rel=2e-3)


def test_weights_gathered_in_float8_give_the_same_losses(folder: Path) -> None:
    """Two ranks compute the same whether they gather float8 or bfloat16, and agree with one process."""
    one = losses_of_run(folder, "one")
    shards = {
        gather: losses_of_run(folder, f"gather_{gather}", "mesh.data_shard=2", f"float8.gather={gather}", processes=2)
        for gather in ("false", "true")
    }
    for mine, other, alone in zip(shards["true"], shards["false"], one, strict=True):
        assert list(mine) == pytest.approx(list(other), rel=1e-5)
        assert list(mine) == pytest.approx(list(alone), rel=2e-2)


def test_experts_on_two_ranks_have_the_losses_of_one_process(folder: Path) -> None:
    """Two ranks with float8 experts, which a dispatcher sends rows, agree with one process up to rounding."""
    one = losses_of_run(folder, "one", *EXPERTS)
    words = (*EXPERTS, "mesh.data_shard=2", "mesh.expert=2", 'stages.dispatcher={use="experts.all_to_all"}')
    two = losses_of_run(folder, "two", *words, processes=2)
    for mine, other in zip(two, one, strict=True):
        assert list(mine) == pytest.approx(list(other), rel=2e-2)


def test_products_of_a_base_in_nf4_run_in_float8(folder: Path) -> None:
    """Adapters on a base in NF4 have close losses with float8 and bfloat16 products, on one rank and with shards."""
    gathered = "mesh.data_shard=2", "float8.gather=true"
    bfloat16 = losses_of_run(folder, "bfloat16", *QLORA, "float8.exclude=['*_proj']")
    one = losses_of_run(folder, "float8", *QLORA)
    two = losses_of_run(folder, "shards", *QLORA, *gathered, processes=2)
    assert [loss for loss, _ in one] != [loss for loss, _ in bfloat16]
    for mine, other, sharded in zip(one, bfloat16, two, strict=True):
        assert mine[0] == pytest.approx(other[0], rel=2e-2)
        assert list(sharded) == pytest.approx(list(mine), rel=2e-2)
