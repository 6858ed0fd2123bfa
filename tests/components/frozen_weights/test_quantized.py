"""Which frozen weights are quantized, and what is refused."""

from typing import Any

import pytest
import torch

import drawloom
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.frozen_weights.layers import find_storable_weights
from drawloom.components.frozen_weights.quantized import QuantizedWeights, compute_storage_slice
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.components.ports.model import list_quantized_parameter_formats
from drawloom.components.ports.slices import RankSlice, TensorSlice
from drawloom.graph import UserError
from drawloom.kernels.weight_formats.eager import FORMATS, NF4
from support.qwen3 import SIZES, SPARSE_SIZES

DENSE: dict[str, Any] = SIZES | {"hidden_size": 128, "head_dim": 64, "intermediate_size": 192}


def convert(module: Any, splits: dict[str, Any], exclude: tuple[str, ...] = (), uncast: tuple[str, ...] = ()) -> None:
    precision = DtypePolicy(compute="bfloat16", uncast=uncast)
    QuantizedWeights(format="nf4", exclude=exclude).convert(module, precision, splits)


def frozen(kind: Any, sizes: dict[str, Any]) -> Any:
    return kind(kernels=None, **sizes).build_on_meta().bfloat16().requires_grad_(False)


def test_projections_and_experts_are_stored_and_nothing_else_is() -> None:
    """Linear layers and experts in blocks are chosen; head, embedding, norms, routers and trained weights are not."""
    module = frozen(Qwen3Dense, DENSE | {"tie_word_embeddings": False})
    trained = "model.layers.0.mlp.up_proj.weight"
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    module.get_parameter(trained).requires_grad_()
    convert(module, {}, ("*.layers.1.*",), ("*.k_proj.weight",))
    names = {f"{name}.weight" for name, _ in module.named_modules() if name.endswith("_proj")}
    excluded = {name for name in names if ".layers.1." in name or ".k_proj." in name}
    assert list_quantized_parameter_formats(module) == dict.fromkeys(names - excluded - {trained}, NF4)
    for name in list_quantized_parameter_formats(module):
        assert module.get_parameter(name).shape == NF4.storage_shape(shapes[name])
    sparse = find_storable_weights(frozen(Qwen3Moe, SPARSE_SIZES))
    assert any(name.endswith("experts.down_proj") for name in sparse)
    assert not any(".gate.weight" in name for name in sparse)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_slices_of_ranks_become_slices_of_storage(name: str) -> None:
    """The second half of all columns has the second half of every storage row."""
    weight_slice = TensorSlice((8, 512), (0, 256), (8, 256))
    stored = FORMATS[name].quantize(torch.randn(8, 512))
    part = stored[compute_storage_slice(FORMATS[name], weight_slice).index()]
    assert torch.equal(FORMATS[name].dequantize(part), FORMATS[name].dequantize(stored)[:, 256:])


def test_columns_that_cut_a_block_are_an_error_with_a_remedy() -> None:
    """The error names the weight, its columns on the rank, the blocks, and the pattern to write."""
    name = "model.layers.0.mlp.down_proj.weight"
    module = frozen(Qwen3Dense, DENSE)
    splits = {name: RankSlice(TensorSlice((128, 192), (0, 96), (128, 96)), SingleProcess())}
    with pytest.raises(
        UserError, match=r"down_proj\.weight has columns 96 to 192 .* blocks of 64; .*\[\"\*\.down_proj\.weight\"\]"
    ):
        convert(module, splits)


def problems(*words: str) -> list[str]:
    sizes = ("model.hidden_size=192", "model.head_dim=64", "model.intermediate_size=256")
    recipe = drawloom.Recipe.load("first_run", "precision.compute='bfloat16'", *sizes, *words)
    return [text for text in map(str, recipe.graph.problems) if "DL401" in text or "DL302" in text]


LORA = (
    "stages.adapters=['@lora']",
    "lora.use=adapters.lora",
    "lora.targets=['*_proj']",
    "lora.rank=4",
    "lora.alpha=8.0",
)
FROZEN = "quantized.use=frozen_weights.quantized"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ((FROZEN, *LORA), []),
        ((FROZEN,), ["no weight is frozen", "write adapters"]),
        (
            (FROZEN, *LORA, "model.intermediate_size=480"),
            ["down_proj.weight has 480 columns", '["*.down_proj.weight"]'],
        ),
        ((FROZEN, *LORA, "mesh.tensor=2", "model.intermediate_size=320"), ["has columns 0 to 160 on one rank along"]),
        ((FROZEN, *LORA, "compile.use=stages.compiled"), ["torch.compile does not trace quantized", "[compile]"]),
        ((FROZEN, *LORA, "precision.compute='float32'"), ["compute in 'float32'", "write compute = 'bfloat16'"]),
        ((FROZEN, *LORA, "float8.use=float8.training"), []),
        ((FROZEN, *LORA, 'quantized.exclude=["*.q_prj"]'), ["no weight of a linear layer or experts"]),
        (("precision.frozen='nf4'",), ['write a table [quantized] with use = "frozen_weights.quantized"']),
    ],
)
def test_check_refuses_recipes_whose_weights_can_not_be_quantized(words: tuple[str, ...], parts: list[str]) -> None:
    """Each mistake is one problem with a remedy, and a recipe without mistakes has none."""
    found = problems(*words)
    assert len(found) == bool(parts), found
    assert all(part in found[0] for part in parts), found


def test_explain_counts_the_weights_and_their_bits() -> None:
    """`explain` counts the quantized weights, their elements and the bits of an element."""
    sizes = ("model.hidden_size=192", "model.head_dim=64", "model.intermediate_size=256")
    recipe = drawloom.Recipe.load("first_run", "precision.compute='bfloat16'", *sizes, FROZEN, *LORA)
    assert "nf4: 28 frozen weights, " in recipe.explain("stages")
    assert "elements of 4.5 bits" in recipe.explain("stages")
