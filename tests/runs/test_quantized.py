"""Runs that adapt a model whose frozen weights are quantized (QLoRA), on a CPU in plain torch."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drawloom.kernels.weight_formats.eager import NF4, NF4_VALUES
from support.runs import drawloom, series, take_back, write_corpus

LEARNED = ("step", "loss", "grad_norm", "lr")
SIZES = (
    "model.num_hidden_layers=2",
    "model.hidden_size=128",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.head_dim=32",
    "model.intermediate_size=256",
)
QLORA = """
extends = ["./tiny.toml", "with_nf4"]

[model]
use = "model.auto"
path = "runs/base/export"

[batch]
global_size = 4
micro_size = 1

[stages]
adapters = ["@lora"]

[lora]
use = "adapters.lora"
targets = ["*_proj"]
rank = 4
alpha = 8.0

[lr]
start = 1.0
phases = [{ to = 1.0, steps = 1 }]

[adapter]
use = "export.adapter"

[checkpoint]
every = 2

[trainer]
steps = 4
on_finish = ["@export", "@adapter", "@sample"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an exported base model in bfloat16 and a run that adapts it on one process."""
    folder = tmp_path_factory.mktemp("quantized")
    write_corpus(folder)
    (folder / "qlora.toml").write_text(QLORA, "utf-8")
    words = ("run.name=base", "trainer.steps=1", "trainer.on_finish=['@export']", "export.dtype=bfloat16")
    assert drawloom(folder, "run", "tiny.toml", *SIZES, *words)[0].code == 0
    train(folder, "one")
    return folder


def train(folder: Path, name: str, *words: str, ranks: int = 1) -> str:
    """Run the recipe and return what rank 0 printed."""
    outcomes = drawloom(folder, "run", "qlora.toml", f"run.name={name}", *words, ranks=ranks)
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
    return outcomes[0].text


def read_losses(folder: Path, name: str) -> list[float]:
    return [loss for (loss,) in series(folder / "runs" / name, "loss")]


def test_a_resumed_run_has_the_bits_of_a_whole_one(folder: Path) -> None:
    """
    A resumed run, and a recomputing run that streams weights, quantize the base again, and equal the uninterrupted run
    bit for bit.
    """
    whole = series(folder / "runs/one", *LEARNED)
    train(folder, "parts")
    take_back(folder / "runs/parts", 2)
    train(folder, "parts")
    train(folder, "blocks", "stages.recompute=blocks", "streamed.use=frozen_weights.streamed")
    assert series(folder / "runs/parts", *LEARNED) == whole == series(folder / "runs/blocks", *LEARNED)


def test_a_streamed_base_in_the_compute_dtype_leaves_no_trace(folder: Path) -> None:
    """Losses and the merged export have the bits of a resident base, read from the same folder, also on a pipeline."""
    words = "quantized.exclude=['*']", "mesh.pipeline=2", "trainer.on_finish=['@export']"
    train(folder, "resident", *words, ranks=2)
    train(folder, "streamed", *words, "streamed.use=frozen_weights.streamed", ranks=2)
    assert series(folder / "runs/streamed", *LEARNED) == series(folder / "runs/resident", *LEARNED)
    resident, streamed = (
        [path.read_bytes() for path in sorted((folder / f"runs/{name}/export").glob("*.safetensors"))]
        for name in ("resident", "streamed")
    )
    assert resident == streamed and len(resident) == 2


MESHES = {
    "replicas": ("mesh.data_replicate=2",),
    "shards": ("mesh.data_shard=2",),
    "tensor": ("mesh.tensor=2",),
    "zero_bubble": ("mesh.pipeline=2", "schedule.use=pipeline.schedules.zero_bubble_1p"),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_has_the_losses_of_one_process(folder: Path, mesh: str) -> None:
    """Losses equal one process up to rounding if ranks split, shard or copy the quantized base."""
    train(folder, mesh, *MESHES[mesh], "trainer.on_finish=['@export']", ranks=2)
    assert read_losses(folder, mesh) == pytest.approx(read_losses(folder, "one"), rel=5e-3)


def test_products_of_a_quantized_base_run_in_float8(folder: Path) -> None:
    """Losses in float8 on a quantized base are close to bfloat16's, on one rank and with shards of the storage."""
    text = train(folder, "float8", "float8.use=float8.training", "trainer.on_finish=[]")
    assert "14 frozen weights in nf4, 14 of 14 linear layers multiply in float8" in text
    words = "mesh.data_shard=2", "float8.use=float8.training", "float8.gather=true", "trainer.on_finish=[]"
    train(folder, "float8_shards", *words, ranks=2)
    one, shards, bfloat16 = (read_losses(folder, name) for name in ("float8", "float8_shards", "one"))
    assert one != bfloat16 and one == pytest.approx(bfloat16, rel=2e-2) and shards == pytest.approx(one, rel=1e-2)


def test_the_adapter_is_merged_into_the_unquantized_base(folder: Path) -> None:
    """The export is the bfloat16 base plus the factors' product, although the run's base is quantized."""
    base = load_file(folder / "runs/base/export/model.safetensors")
    merged = load_file(folder / "runs/one/export/model.safetensors")
    factors = load_file(folder / "runs/one/adapter/adapter_model.safetensors")
    assert base.keys() == merged.keys()
    changed = 0
    for name, weight in base.items():
        first = factors.get(f"base_model.model.{name.removesuffix('weight')}lora_A.weight")
        if first is None:
            assert torch.equal(merged[name], weight)
            continue
        second = factors[f"base_model.model.{name.removesuffix('weight')}lora_B.weight"]
        expected = weight.float() + 2.0 * (second.float() @ first.float())
        assert torch.equal(merged[name], expected.bfloat16())
        changed += not torch.equal(merged[name], weight)
    assert changed


@pytest.mark.parametrize("name", ["one", "dora"])
def test_peft_loads_the_adapter_onto_the_unquantized_base(folder: Path, name: str) -> None:
    """LoRA and DoRA, trained on NF4: peft's logits are those of our merged export, up to its rounding to bfloat16."""
    from peft import PeftModel  # takes seconds
    from transformers import AutoModelForCausalLM

    if name == "dora":
        train(folder, name, "lora.dora=true", "trainer.on_finish=['@export', '@adapter']")
        losses, plain = read_losses(folder, name), read_losses(folder, "one")
        assert losses[0] == pytest.approx(plain[0], rel=1e-3)  # both start from the base's weights
        assert losses != plain
    load: Any = AutoModelForCausalLM
    tokens = torch.arange(24).unsqueeze(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers' own deprecations
        base, merged = (
            load.from_pretrained(folder / f"runs/{run}/export", dtype=torch.float32) for run in ("base", name)
        )
        before, ours = base(tokens).logits, merged(tokens).logits
        theirs = PeftModel.from_pretrained(base, str(folder / f"runs/{name}/adapter")).eval()(tokens).logits
    assert (theirs - ours).norm() < 0.1 * (before - ours).norm()


SPARSE = """
extends = ["./tiny.toml", "with_nf4"]

[model]
use = "model.qwen3.moe"
num_hidden_layers = 2
hidden_size = 64
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 64
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 64
intermediate_size = 64

[stages]
adapters = ["@lora"]
dispatcher = { use = "experts.all_to_all" }

[lora]
use = "adapters.lora"
targets = ["experts"]
rank = 4
alpha = 8.0

[trainer]
steps = 3
on_finish = []
"""


def test_experts_train_on_a_quantized_base(folder: Path) -> None:
    """Losses of two ranks that partition quantized experts equal one process's up to rounding."""
    (folder / "sparse.toml").write_text(SPARSE, "utf-8")
    for name, words, ranks in (
        ("sparse", ("mesh.expert=1",), 1),
        ("expert", ("mesh.data_shard=2", "mesh.expert=2"), 2),
    ):
        outcomes = drawloom(folder, "run", "sparse.toml", f"run.name={name}", "batch.micro_size=2", *words, ranks=ranks)
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
    one, two = read_losses(folder, "sparse"), read_losses(folder, "expert")
    assert two == pytest.approx(one, rel=5e-3)
    assert "12 frozen weights in nf4" in outcomes[0].text


def test_a_folder_of_bitsandbytes_trains_like_the_base_that_it_was_made_of(folder: Path) -> None:
    """A folder with codes and scales of NF4 has the losses of a run that quantizes the base, bit for bit."""
    shutil.copytree(folder / "runs/base/export", folder / "nf4")
    tensors = load_file(folder / "nf4/model.safetensors")
    for name, weight in list(tensors.items()):
        if name.endswith("_proj.weight"):
            codes, scales = NF4.unpack_storage(NF4.quantize(weight))
            state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*weight.shape]}
            text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
            parts = {"": codes.reshape(-1, 1), ".absmax": scales.flatten(), ".quant_map": torch.tensor(NF4_VALUES)}
            tensors |= {name + end: part for end, part in parts.items()}
            tensors[f"{name}.quant_state.bitsandbytes__nf4"] = text
    save_file(tensors, folder / "nf4/model.safetensors")
    config = json.loads((folder / "nf4/config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "nf4/config.json").write_text(json.dumps(config), "utf-8")
    train(folder, "folder", "model.path=nf4", "trainer.on_finish=[]")
    assert series(folder / "runs/folder", *LEARNED) == series(folder / "runs/one", *LEARNED)
