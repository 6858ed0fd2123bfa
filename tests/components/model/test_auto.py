"""Models of any family, chosen by the folder."""

import copy
import json
import operator
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.model.auto import FAMILIES, AutoModel
from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.pattern import Pattern
from drawloom.components.ports.model import LayerRange, Model
from drawloom.graph import RecipeError, UserError
from drawloom.graph.project import Recipe
from drawloom.graph.types.port_match import find_mismatches
from support.adapted import OneStage
from support.families import small
from support.qwen3 import SPARSE_SIZES, cpu_kernels, whole

TEXT = 'corpus.paths=["*.txt"]'


def made(kind: type[DecoderBuilder]) -> DecoderBuilder:
    """Return a small model of a family."""
    sizes = {key: size for key, size in (SPARSE_SIZES | {"num_key_value_heads": 4}).items() if key in kind.keys}
    return small(kind, **sizes, **({"layers": "1 x gdn, 1 x attention"} if kind is Pattern else {}))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_folder_is_read_as_the_model_that_wrote_it(model_type: str, tmp_path: Path) -> None:
    """Family, sizes, names and initial values equal the family's own component's with the same sizes."""
    model = made(FAMILIES[model_type])
    write_hugging_face_folder(tmp_path / "base", model, OneStage(whole(model)))
    auto = AutoModel(kernels=cpu_kernels(), path=tmp_path / "base")
    assert not find_mismatches(AutoModel, Model)
    assert auto.family is FAMILIES[model_type] and auto.initial_weights == tmp_path / "base"
    assert auto.hugging_face_config() == model.hugging_face_config()
    assert (auto.num_hidden_layers, auto.vocab_size) == (2, 29)
    span = LayerRange(0, 2, embedding=True, head=True)
    ours, theirs = dict(auto.build(span).named_parameters()), dict(model.build(span).named_parameters())
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }
    assert auto.hugging_face_mapper().outputs == model.hugging_face_mapper().outputs
    one, other = torch.empty(24, 24), torch.empty(24, 24)
    auto.initialize_parameter("x.weight", one, 3)
    model.initialize_parameter("x.weight", other, 3)
    assert torch.equal(one, other)


ODD_VALUES: tuple[Any, ...] = ("x", [], {}, None, -1, 0.5, True, ["x"], [3], {"x": 3}, [[3]], 0)

READ_KEYS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 64,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 8,
    "full_attention_interval": 2,
    "full_attn_idxs": [0],
    "hybrid_override_pattern": "M*",
    "index_skip_topk_offset": 2,
    "index_topk_freq": 2,
    "index_topk_pattern": "FS",
    "linear_attn_config": {"full_attn_layers": [1], "head_dim": 8, "num_heads": 2},
    "mlp_layer_types": ["dense", "sparse"],
    "no_rope_layer_interval": 2,
    "per_layer_config": {"full_attention": {"head_dim": 16}},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rotary_dim": 8,
    "sliding_window_pattern": 2,
    "text_config": {},
}
"""Keys that files of some families have, and that none writes or all read."""

DERIVED_KEYS = ("layer_types", "layers_block_type", "indexer_types", "no_rope_layers", "linear_key_head_dim")


def _find_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to a value's keys, and to the first items of its lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _find_paths(inner, (*path, key))


@pytest.mark.parametrize("step", [len(ODD_VALUES), pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", [*dict.fromkeys(FAMILIES.values()), Pattern], ids=lambda kind: kind.__name__)
def test_an_odd_value_in_a_config_is_built_or_refused(kind: type[DecoderBuilder], step: int, tmp_path: Path) -> None:
    """Every key of a family's file with any odd value makes a model, or one message with the file and a remedy."""
    written, refused = made(kind).hugging_face_config(), set()
    underived = {key: value for key, value in written.items() if key not in DERIVED_KEYS}
    (tmp_path / "config.json").touch()
    bases = (written, list(_find_paths(written))), (underived | READ_KEYS, list(_find_paths(READ_KEYS)))
    shift = len(kind.__name__)  # by default a family has one value for a key, and another family has another
    for base, path in ((base, path) for base, paths in bases for path in paths):
        shift += 1
        for odd in ODD_VALUES[shift % step :: step]:
            config = copy.deepcopy(base)
            reduce(operator.getitem, path[:-1], config)[path[-1]] = odd
            (tmp_path / "config.json").write_text(json.dumps(config))
            try:
                model = (
                    Pattern(kernels=cpu_kernels(), config=tmp_path)
                    if kind is Pattern
                    else AutoModel(kernels=cpu_kernels(), path=tmp_path, weights=False)
                )
                if model.num_hidden_layers < 9:
                    model.build_on_meta()
            except UserError as error:
                message = str(error)
                assert str(tmp_path) in message and re.search("; (correct|take|write) ", message), message
                refused.add(path[0])
    assert len(refused) > 5


@pytest.mark.parametrize("kind", dict.fromkeys(FAMILIES.values()), ids=lambda kind: kind.__name__)
def test_a_rotary_scaling_is_written_as_it_was_read(kind: type[DecoderBuilder], tmp_path: Path) -> None:
    """A config with scaled positions is refused, or its model's own file is read as the same config."""
    file, scaling = tmp_path / "config.json", {"rope_type": "linear", "factor": 2.0}
    file.write_text(json.dumps(made(kind).hugging_face_config() | {"rope_scaling": scaling}))
    try:
        first = read_config(kind, file)
    except UserError as error:
        assert "rope_" in str(error)
        return
    assert first.rope_scaling is not None and first.rope_scaling.factor == 2.0
    file.write_text(json.dumps(kind.build_config(first)))
    assert read_config(kind, file) == first


def test_every_family_is_in_the_documentation() -> None:
    """docs/families.md has every family's component in the first column of its table."""
    page = (Path(__file__).parents[3] / "docs" / "families.md").read_text("utf-8")
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `model."))
    assert {f"`{kind.__module__.removeprefix('drawloom.components.')}`" for kind in FAMILIES.values()} <= set(
        re.findall(r"`[^`]+`", rows)
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (None, "can't be read"),
        (
            {"model_type": "gpt2"},
            'says model_type = "gpt2"; take a model of one of .*dots1, .*llama, .*qwen3.*docs/families.md',
        ),
        ({"model_type": "llama", "hidden_act": "gelu"}, "says hidden_act"),
    ],
)
def test_a_folder_of_an_unknown_model_is_refused(config: Any, text: str, tmp_path: Path) -> None:
    """The message quotes the config, and for an unknown model type lists the known ones."""
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=text):
        _ = AutoModel(kernels=cpu_kernels(), path=tmp_path).vocab_size


def lacking(*words: str) -> list[str]:
    """Return fine-tuning's problems and warnings, including the machine's."""
    recipe = Recipe.load("finetune", f'corpus.paths=["{Path(__file__)}"]', *words)
    try:
        return [str(problem) for problem in recipe.check()]
    except RecipeError as error:
        return [str(problem) for problem in error.problems]


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("Qwen/Qwen3-0.6B", "such as `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` makes"),
        ("nowhere", "write one with a config.json (DL403)"),
        ("/no/where", "write one with a config.json (DL403)"),
    ],
)
def test_a_missing_folder_is_not_downloaded(path: str, instead: str) -> None:
    """If a recipe has a model's name on the hub, the problem gives the command that downloads it."""
    [problem] = [text for text in lacking(f"vars.base={path}") if "[model]" in text]
    assert problem.startswith("command line: [model] path: ")
    assert f"there is no folder {path}; " in problem and instead in problem


def test_check_compares_the_weights_with_the_config(tmp_path: Path) -> None:
    """
    Names and shapes of all tensors, the tokenizer's ids, and narrower dtypes are checked before anything is loaded.
    """
    folder = tmp_path / "base"
    model = small(FAMILIES["llama"])
    write_hugging_face_folder(folder, model, OneStage(whole(model)))
    tokenizer = Tokenizer(WordLevel({f"word{number}": number for number in range(31)}))
    tokenizer.save(str(folder / "tokenizer.json"))

    def problems(*words: str) -> list[str]:
        return lacking(f"vars.base={folder}", "tokenizer.end_token=word0", *words)

    assert problems("model.new_tokens=2") == []
    [problem] = problems()
    assert "has 31 ids, but the model's vocabulary only 29; write new_tokens = 2 for some" in problem
    rounded = ("precision.parameter=bfloat16", "optimizer.use=optim.stochastic_adamw", "optimizer.lr=1e-3")
    [problem] = problems("model.new_tokens=2", *rounded)
    assert "are float32, and are rounded to bfloat16" in problem and "warning" in problem
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(5)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    [problem] = problems("model.new_tokens=2")
    assert "missing model.layers.0.mlp.up_proj.weight; wrong shape model.norm.weight (5,) for (24,)" in problem


def test_a_run_folder_or_a_file_is_not_an_export(tmp_path: Path) -> None:
    """The problem asks for the folder with the weights, and the model never starts with random ones."""
    (tmp_path / "recipe.lock.toml").touch()
    (tmp_path / "config.json").touch()
    for given, text, instead in (
        (tmp_path, "is a run folder", tmp_path / "export"),
        (tmp_path / "config.json", "is a file, but weights are loaded from a folder", tmp_path),
    ):
        [problem] = [line for line in lacking(f"vars.base={given}") if "[model]" in line]
        assert text in problem and str(instead) in problem and "weights = false" not in problem
