"""Frozen weights in host memory against the same weights on the device, bit for bit."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.frozen_weights import streamed as streamed_module
from drawloom.components.frozen_weights.streamed import StreamedWeights
from drawloom.components.planning.plan import plan
from drawloom.components.stages import initial_values
from drawloom.graph import UserError
from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Recipe
from support.pipelines import batches
from support.steps import train
from support.transfers import DelayedTransfers, NoWaits

WORDS = (
    *("model.num_hidden_layers=4", "model.hidden_size=64", "model.intermediate_size=64", "model.head_dim=16"),
    *("model.num_attention_heads=4", "model.num_key_value_heads=2", "device.kind=cpu", "precision.compute=bfloat16"),
    *("precision.gradient=float32", 'stages.adapters=["@lora"]'),
    'lora={use="adapters.lora",targets=["*_proj"],rank=4,alpha=8.0}',
)
NF4 = "quantized.use=frozen_weights.quantized"
STREAMED = "streamed.use=frozen_weights.streamed"
STEPS, MICROBATCHES = 3, 2


def gradients(folder: Path, *words: str) -> tuple[dict[str, Tensor], int]:
    """Return the adapters' gradients after some steps, and the bytes of frozen weights in host memory."""
    recipe = Recipe.load("first_run", *WORDS, f"run.folder={folder / 'run'}", *words)
    with recipe.open(only="executor") as objects:
        executor = objects["executor"]
        for _ in range(STEPS):
            train(executor, batches(MICROBATCHES))
        named = executor.stages.named_parameters()
        gradients = {name: part.grad.clone() for name, part in named if part.grad is not None}
        return gradients, executor.stages.feature_host_bytes


def use_transfers(monkeypatch: pytest.MonkeyPatch, transfers: Any) -> None:
    """Let streamed weights open these transfers."""
    monkeypatch.setattr(StreamedWeights, "_transfers", transfers)


EXPERTS = (
    *("model.use=model.qwen3.moe", "model.num_experts=4", "model.num_experts_per_tok=2"),
    *("model.moe_intermediate_size=64",),
)


@pytest.mark.parametrize(
    ("recompute", "passes", "window", "words"),
    [
        ("none", 2, 1, (NF4,)),
        ("blocks", 3, 20_000, (NF4,)),
        ("none", 2, 2**28, (NF4,)),
        ("none", 2, 20_000, ("model.use=model.llama", "model.attention_bias=true")),
        ("selective", 2, 20_000, EXPERTS),
        ("blocks", 3, 1, ("precision.compute=float32",)),
    ],
)
def test_streamed_weights_leave_no_trace(
    recompute: str,
    passes: int,
    window: int,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    Gradients have the bits of resident weights, quantized or in the compute dtype, whatever the window is; no pass
    copies a weight twice.
    """
    monkeypatch.setattr(streamed_module, "WINDOW_BYTES", window)
    use_transfers(monkeypatch, transfers := DelayedTransfers(window % 7))
    resident, _ = gradients(tmp_path, *words, f"stages.recompute={recompute}")
    streamed, on_host = gradients(tmp_path, *words, f"stages.recompute={recompute}", STREAMED)
    assert streamed.keys() == resident.keys() and all(torch.equal(streamed[name], resident[name]) for name in resident)
    # The first block's input needs no gradient, so that the backward pass leaves out some weights.
    most = STEPS * MICROBATCHES * passes * on_host
    assert transfers.stored == 0 and 0.9 * most < transfers.fetched < most


def test_streamed_weights_are_never_whole_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device too small for the frozen weights refuses resident ones, and holds the rest of a streamed model."""
    monkeypatch.setattr(initial_values, "get_device_memory", lambda device: 150_000)
    with pytest.raises(UserError, match="the parameters of this rank take"):
        gradients(tmp_path)
    _, on_host = gradients(tmp_path, STREAMED)
    assert on_host > 150_000


def test_a_product_that_does_not_wait_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight in use before it arrives changes gradients, so the comparison above can fail."""
    use_transfers(monkeypatch, NoWaits(1))
    (resident, _), (hasty, _) = gradients(tmp_path, NF4), gradients(tmp_path, NF4, STREAMED)
    assert any(not torch.equal(hasty[name], resident[name]) for name in resident)


@pytest.mark.parametrize("words", [(NF4,), ()], ids=["nf4", "compute"])
def test_a_plan_counts_streamed_weights_on_the_host_and_on_the_link(words: tuple[str, ...]) -> None:
    """Their bytes move to the host, but for those on their way, and a slow link determines a step's time."""
    device = find_device_model("cpu")
    resident, streamed = (plan(Recipe.load("first_run", *WORDS, *words, *more), device) for more in ((), (STREAMED,)))
    slow = plan(Recipe.load("first_run", *WORDS, *words, STREAMED), attrs.evolve(device, host_link=1e3))
    on_host = streamed.memory[0].host
    persistent, fewer = (planned.memory[0].persistent for planned in (resident, streamed))
    assert on_host == resident.memory[0].host + persistent["parameters"] - fewer["parameters"] > 0
    assert fewer["compute_copies"] - persistent.get("compute_copies", 0) == min(streamed_module.WINDOW_BYTES, on_host)
    most = 2 * slow.microbatches * on_host / 1e3
    assert 0.9 * most < slow.time.compute < most


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("stages.adapters=[]",), "no weight is frozen"),
        (("float8.use=float8.training",), "round weights on the device"),
        (("compile.use=stages.compiled",), "does not trace copies"),
        (("capture.use=pipeline.captured",), "fixed places on the device"),
        (("mesh.data_shard=2",), "gathered from other ranks"),
        (("mesh.context=2",), "data_shard = 1 and context = 1 in"),
    ],
)
def test_check_refuses_weights_that_can_not_be_streamed(words: tuple[str, ...], message: str) -> None:
    """Trained weights, and weights in float8, compiled blocks, CUDA graphs and shards are problems."""
    with pytest.raises(RecipeError, match=message):
        Recipe.load("first_run", *WORDS, STREAMED, *words).check()
