"""The choice of linear layers for float8, and refused settings."""

from typing import Any

import pytest
import torch

import drawloom
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.float8.layers import Float8Linear, find_float8_candidates
from drawloom.components.float8.training import Float8Training
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.graph import UserError
from support.doubles import Machine
from support.qwen3 import SIZES, SPARSE_SIZES

DENSE: dict[str, Any] = SIZES | {"hidden_size": 32, "head_dim": 16, "intermediate_size": 48}


def whole(kind: Any, sizes: dict[str, Any]) -> Any:
    return kind(kernels=None, **sizes).build_on_meta()


def convert(module: Any, exclude: tuple[str, ...] = (), **dtypes: Any) -> set[str]:
    """Convert a module, and return the names of linear layers in float8."""
    feature = Float8Training(device=Machine(), exclude=exclude)
    feature.convert(module, DtypePolicy(**{"compute": "bfloat16"} | dtypes), {})
    return {name for name, layer in module.named_modules() if isinstance(layer, Float8Linear)}


def test_projections_use_float8_and_nothing_else_does() -> None:
    """All projections in blocks are chosen; the head, the embedding, norms and routers are not."""
    module = whole(Qwen3Dense, DENSE | {"tie_word_embeddings": False})
    names = {name for name, _ in module.named_parameters()}
    assert convert(module) == {name for name, _ in module.named_modules() if name.endswith("_proj")}
    assert {name for name, _ in module.named_parameters()} == names
    assert convert(whole(Qwen3Dense, DENSE), compute="float32") == set()
    sparse = whole(Qwen3Moe, SPARSE_SIZES)
    assert not any(name.endswith("mlp.gate") for name in find_float8_candidates(sparse))


def test_patterns_and_uncast_weights_exclude_layers() -> None:
    """A layer is excluded by a matching pattern, and by a weight kept in the parameter dtype."""
    every = convert(whole(Qwen3Dense, DENSE))
    few = convert(whole(Qwen3Dense, DENSE), ("model.layers.0.*",), uncast=("*.down_proj.weight",))
    assert few == {name for name in every if ".layers.0." not in name and not name.endswith("down_proj")}


def test_widths_that_do_not_divide_are_an_error_with_a_remedy() -> None:
    """The error names the layer, its shape on the rank, and the pattern to write."""
    with pytest.raises(UserError, match=r"down_proj is 32 x 40 on each rank.*exclude = \[\"\*\.down_proj\"\]"):
        convert(whole(Qwen3Dense, DENSE | {"intermediate_size": 40}), ("*.gate_proj", "*.up_proj"))


def test_gpus_without_float8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Ampere GPU is refused with its name; Hopper, and a CPU, which uses plain torch, are not."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, is_refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        feature = Float8Training(device=Machine(torch.device("cuda")))
        if is_refused:
            with pytest.raises(UserError, match=r"A100 has compute capability 8\.0, and products in float8 need 8\.9"):
                feature.check_before_open()
        else:
            feature.check_before_open()
    Float8Training(device=Machine()).check_before_open()


def problems(*words: str) -> list[str]:
    recipe = drawloom.Recipe.load("first_run", *words)
    return [text for text in map(str, recipe.graph.problems) if "DL401" in text or "DL302" in text]


FLOAT8 = ("precision.compute='bfloat16'", "float8.use=float8.training")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (FLOAT8, []),
        ((*FLOAT8, "model.intermediate_size=500"), ["mlp.gate_proj is 500 x 192 on each rank", '["*.gate_proj"]']),
        ((*FLOAT8, "mesh.tensor=2", "model.intermediate_size=496"), ["mlp.gate_proj is 248 x 192 on each rank"]),
        ((*FLOAT8, "compile.use=stages.compiled"), ["torch.compile does not trace products in float8", "[compile]"]),
        (FLOAT8[1:], ["compute in 'float32', and products in float8 accept only bfloat16", "or remove [float8]"]),
        ((*FLOAT8, 'float8.exclude=["*.q_prj"]'), ["or layer of experts is called '*.q_prj'"]),
        ((*FLOAT8, "float8.round_weights='step'"), []),
        (
            (*FLOAT8, "float8.round_weights='step'", "mesh.data_shard=2", "batch.micro_size=8"),
            ["shards are gathered for every use"],
        ),
        (
            (*FLOAT8, "kernels.use=kernels.batch_invariant"),
            ["[kernels] has no products in float8 that are batch-invariant"],
        ),
        ((*FLOAT8, "float8.implementation='triton'", "device.kind='cpu'"), ["'triton' runs on GPUs"]),
        (("precision.linear='float8'",), ['a table [float8] with use = "float8.training"']),
        (("kernels.linear_float8='eager'",), ['write implementation in a table with use = "float8.training"']),
    ],
)
def test_check_refuses_recipes_that_cannot_multiply_in_float8(words: tuple[str, ...], parts: list[str]) -> None:
    """Each mistake is one problem with a remedy, and a recipe without mistakes has none."""
    found = problems(*words)
    assert len(found) == bool(parts), found
    assert all(part in found[0] for part in parts), found


def test_explain_counts_the_layers() -> None:
    """`explain` counts the linear layers in float8."""
    for words, text in (((), "28 of 28"), (('float8.exclude=["*.down_proj"]',), "24 of 28")):
        recipe = drawloom.Recipe.load("first_run", *FLOAT8, *words)
        assert f"float8: {text} linear layers multiply in float8" in recipe.explain("stages")
