"""Reading other people's config.json."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.model.decoder.hugging_face import read_config
from drawloom.components.model.decoder.rope import RopeScaling
from drawloom.components.model.decoder.rope_scaling import convert_to_kernel_scaling
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.model.qwen3.moe import Qwen3Moe, Qwen3MoeConfig
from drawloom.graph import UserError
from drawloom.kernels.rope.frequencies import rope_frequencies
from support.qwen3 import dense, sparse


@pytest.fixture
def transformers() -> Any:
    """The package, whose import takes seconds: only the workers of these tests import it."""
    import transformers

    return transformers


def written(folder: Path, **changes: Any) -> Path:
    """Return a good config with changes; a change to None removes the key."""
    config = {key: value for key, value in (good() | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def good() -> dict[str, Any]:
    return dense().hugging_face_config()


def test_a_config_saved_by_transformers_is_read_as_the_same_model(tmp_path: Path, transformers: Any) -> None:
    """Our config, saved by transformers in its newest form, is read as the same model."""
    transformers.Qwen3Config(**good()).save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert read_config(Qwen3Dense, tmp_path) == dense().architecture


def test_transformers_reads_all_numbers_of_our_config(transformers: Any) -> None:
    """Every number of the architecture arrives in transformers' config."""
    config = transformers.Qwen3Config(
        **dense(
            tie_word_embeddings=True, rope_theta=77.0, rms_norm_eps=0.5, max_position_embeddings=99
        ).hugging_face_config()
    )
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.vocab_size) == (
        24,
        2,
        40,
        29,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 77.0}
    assert (config.tie_word_embeddings, config.rms_norm_eps, config.max_position_embeddings) == (True, 0.5, 99)


def test_experts_saved_by_transformers_are_read(tmp_path: Path, transformers: Any) -> None:
    """Our config of a model with experts survives transformers, which has another name for their number."""
    model = sparse(
        num_hidden_layers=4,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        norm_topk_prob=False,
        router_aux_loss_coef=0.0,
        intermediate_size=50,
    )
    transformers.Qwen3MoeConfig(**model.hugging_face_config()).save_pretrained(tmp_path)
    assert "num_experts" not in json.loads((tmp_path / "config.json").read_text())
    assert read_config(Qwen3Moe, tmp_path) == model.architecture


def test_transformers_reads_all_numbers_of_our_experts(transformers: Any) -> None:
    """All numbers for the experts arrive in transformers' config, except the switch of the balancing loss."""
    model = sparse(
        num_hidden_layers=4,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        norm_topk_prob=False,
        router_aux_loss_coef=0.25,
        intermediate_size=50,
    )
    config = transformers.Qwen3MoeConfig(**model.hugging_face_config())
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (5, 2, 12)
    assert (config.norm_topk_prob, config.decoder_sparse_step, config.mlp_only_layers) == (False, 2, [3])
    assert (config.router_aux_loss_coef, config.output_router_logits, config.intermediate_size) == (0.25, False, 50)


def test_missing_keys_have_the_defaults_of_transformers(tmp_path: Path, transformers: Any) -> None:
    """Keys missing in a config of a model with experts are read as in transformers."""
    optional = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef")
    config = {key: value for key, value in sparse().hugging_face_config().items() if key not in optional}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs, ours = transformers.Qwen3MoeConfig(**config), read_config(Qwen3Moe, tmp_path)
    assert isinstance(ours, Qwen3MoeConfig)
    assert (ours.norm_topk_prob, ours.decoder_sparse_step) == (theirs.norm_topk_prob, theirs.decoder_sparse_step)
    assert (list(ours.mlp_only_layers), ours.router_aux_loss_coef) == (
        theirs.mlp_only_layers,
        theirs.router_aux_loss_coef,
    )


FAULTS_OF_EXPERTS: dict[str, tuple[dict[str, Any], str]] = {
    "a dense model": ({"model_type": "qwen3"}, 'model_type = "qwen3", which Qwen3MoeForCausalLM'),
    "missing sizes": ({"num_experts": None, "moe_intermediate_size": None}, "lacks num_experts, moe_intermediate_size"),
    "too many choices": ({"num_experts_per_tok": 6}, "num_experts_per_tok = 6 is more than num_experts = 5"),
    "a layer that is not there": ({"mlp_only_layers": [2]}, "mlp_only_layers names layer 2, and layers are counted"),
    "no sparse layer": ({"mlp_only_layers": [0, 1]}, "no layer has experts"),
    "text for layers": ({"mlp_only_layers": "0"}, 'mlp_only_layers: expected an array of integers, got the string "0"'),
    "fractions of layers": ({"mlp_only_layers": [0.5]}, "mlp_only_layers: expected an integer, got the number 0.5"),
    "below zero": ({"router_aux_loss_coef": -1}, "router_aux_loss_coef: -1.0 is less than 0"),
    "number for a truth": ({"norm_topk_prob": 1}, "norm_topk_prob: expected a boolean, got the integer 1"),
}


@pytest.mark.parametrize(("changes", "message"), FAULTS_OF_EXPERTS.values(), ids=FAULTS_OF_EXPERTS.keys())
def test_experts_that_cannot_be_built_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """A config of a model with unsupported experts is refused."""
    config = {key: value for key, value in (sparse().hugging_face_config() | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as caught:
        read_config(Qwen3Moe, tmp_path)
    assert message in str(caught.value) and "or use the config.json of a qwen3_moe model" in str(caught.value)


def test_both_forms_of_the_rotary_base_are_read(tmp_path: Path) -> None:
    """`rope_theta` at the top and within `rope_parameters` mean the same."""
    top = read_config(Qwen3Dense, written(tmp_path, rope_theta=123.0, rope_scaling=None))
    assert top.rope_theta == 123.0
    rope = {"rope_type": "default", "rope_theta": 123.0}
    assert read_config(Qwen3Dense, written(tmp_path, rope_theta=None, rope_parameters=rope)) == top


STRETCHES = [
    RopeScaling(rope_type="linear", factor=2.0),
    RopeScaling(rope_type="dynamic", factor=3.0),
    RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8),
    RopeScaling(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=8,
        beta_fast=3.0,
        beta_slow=0.5,
        truncate=False,
        attention_factor=1.5,
    ),
    RopeScaling(
        rope_type="longrope",
        original_max_position_embeddings=8,
        short_factor=[1.0] * 4,
        long_factor=[1.0, 2.5, 3.0, 4.0],
        attention_factor=1.25,
    ),
    RopeScaling(
        rope_type="llama3", factor=8.0, original_max_position_embeddings=8, low_freq_factor=0.5, high_freq_factor=2.0
    ),
]


@pytest.mark.parametrize("rope", STRETCHES, ids=lambda rope: rope.rope_type)
def test_rope_scaling_survives_transformers(tmp_path: Path, rope: RopeScaling, transformers: Any) -> None:
    """Scaled positions are read again from our config, and from transformers' copy of it."""
    for make, family, kind in (
        (dense, Qwen3Dense, transformers.Qwen3Config),
        (sparse, Qwen3Moe, transformers.Qwen3MoeConfig),
    ):
        model = make(rope_scaling=rope, rope_theta=500.0, max_position_embeddings=32)
        (tmp_path / "config.json").write_text(json.dumps(model.hugging_face_config()))
        assert read_config(family, tmp_path) == model.architecture
        kind.from_pretrained(tmp_path).save_pretrained(tmp_path / "theirs")
        assert read_config(family, tmp_path / "theirs") == model.architecture


def test_static_ntk_is_exported_as_a_larger_base(transformers: Any) -> None:
    """Hugging Face has no static NTK: its model of the export has the published formula's frequencies, like ours."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    model = dense(rope_scaling=RopeScaling(rope_type="ntk", factor=3.0), rope_theta=500.0)
    width = model.architecture.head_dim
    # b^(-2i/d) * s^(-2i/(d - 2)): the pair i of d / 2 turns the slower, the slower it is; the last one by s
    pairs = torch.arange(width // 2, dtype=torch.float64)
    expected = 500.0 ** (-2 * pairs / width) * 3.0 ** (-2 * pairs / (width - 2))
    written = model.hugging_face_config()
    assert "rope_parameters" not in written
    theirs = Qwen3RotaryEmbedding(transformers.Qwen3Config(**written)).inv_freq
    torch.testing.assert_close(theirs.double(), expected, rtol=1e-6, atol=0)
    scaling: Any = model.architecture.rope_scaling
    ours = rope_frequencies(width, 500.0, convert_to_kernel_scaling(scaling, 32))
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=0)


def test_the_older_form_of_rope_scaling_is_read(tmp_path: Path, transformers: Any) -> None:
    """`type` in `rope_scaling`, and keys that are left out, mean the same as in transformers."""
    old = {"type": "yarn", "factor": 4.0}
    config = read_config(Qwen3Dense, written(tmp_path, rope_scaling=old, max_position_embeddings=77))
    assert config.rope_scaling == RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=77)
    theirs: Any = transformers.Qwen3Config(**good() | {"rope_scaling": old, "max_position_embeddings": 77})
    assert theirs.rope_parameters["original_max_position_embeddings"] == 77


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_the_original_length_at_the_top_takes_precedence(kind: str, tmp_path: Path, transformers: Any) -> None:
    """As in transformers, the length outside `rope_scaling` is used instead of the one inside, if any."""
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    for within in ({}, {"original_max_position_embeddings": 16}):
        scaling = {"type": kind, "factor": 4.0, **bounds, **within}
        config = {"rope_scaling": scaling, "original_max_position_embeddings": 8}
        used = read_config(Qwen3Dense, written(tmp_path, **config)).rope_scaling
        theirs: Any = transformers.Qwen3Config.from_pretrained(tmp_path)
        theirs.standardize_rope_params()  # as when a model is built of it
        assert used is not None
        wanted = theirs.rope_parameters["original_max_position_embeddings"]
        assert used.original_max_position_embeddings == wanted == 8


def test_llama3_is_written_with_all_keys_that_transformers_requires(transformers: Any) -> None:
    """The config has the bounds even if settings leave them out."""
    rope = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=8)
    config: Any = transformers.Qwen3Config(**dense(rope_scaling=rope).hugging_face_config())
    assert (config.rope_parameters["low_freq_factor"], config.rope_parameters["high_freq_factor"]) == (1.0, 4.0)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"model_type": "llama"}, 'model_type = "llama", which Qwen3ForCausalLM'),
    "biases": ({"attention_bias": True}, "attention_bias = true, where only false"),
    "sliding window": ({"use_sliding_window": True}, "use_sliding_window = true, where only false"),
    "sight of what follows": ({"is_causal": False}, "is_causal = false, where only true"),
    "layer types": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "has layer_types that contradict its other keys",
    ),
    "missing sizes": ({"hidden_size": None, "head_dim": None}, "lacks hidden_size, head_dim"),
    "no rotary base": ({"rope_theta": None}, "lacks rope_theta"),
    "scaled in another way": (
        {"rope_scaling": {"rope_type": "proportional"}},
        "rope_type = 'proportional'",
    ),
    "scaled as no config says": (
        {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}},
        "'ntk', where only default, linear, dynamic, yarn, llama3, longrope can be built",
    ),
    "scaled in no way": ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type = ['yarn']"),
    "no object": ({"rope_scaling": [4.0]}, "has an invalid rope_scaling: expected a table, got the array [4.0]"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "lacks factor, which linear needs"),
    "a factor below 1": (
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        "has an invalid factor for rotary positions",
    ),
    "text for a factor": (
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        'has an invalid factor for rotary positions: expected a number, got the string "2"',
    ),
    "a key of others": (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 2.0}},
        "rope_scaling.beta_fast belongs to yarn, and this is linear",
    ),
    "a key that changes all": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]}},
        "has an invalid mrope_section for rotary positions",
    ),
    "a part of each head": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "says partial_rotary_factor = 0.5, where only 1.0 can be built",
    ),
    "a part of each head, at the top": ({"partial_rotary_factor": 0.5}, "says partial_rotary_factor = 0.5"),
    "bounds that cross": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 64}},
        "rope_scaling.beta_fast = 32 is not above beta_slow = 64",
    ),
    "text for a number": ({"hidden_size": "24"}, 'an invalid hidden_size: expected an integer, got the string "24"'),
    "fraction for a size": ({"hidden_size": 24.5}, "an invalid hidden_size: expected an integer, got the number 24.5"),
    "truth for a size": ({"num_hidden_layers": True}, "an invalid num_hidden_layers: expected an integer, got true"),
    "nothing": ({"num_hidden_layers": 0}, "an invalid num_hidden_layers: 0 is less than 1"),
    "number for a truth": (
        {"tie_word_embeddings": 1},
        "an invalid tie_word_embeddings: expected a boolean, got the integer 1",
    ),
    "num_attention_heads": (
        {"num_key_value_heads": 3},
        "num_key_value_heads = 3 does not divide num_attention_heads = 4",
    ),
}


@pytest.mark.parametrize(("changes", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_config_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """A config of a model with other computations is refused, and never read as a similar model."""
    with pytest.raises(UserError) as caught:
        read_config(Qwen3Dense, written(tmp_path, **changes))
    assert message in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "does not contain a JSON object")])
def test_a_file_that_is_not_a_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """A file without a JSON object is refused, and the message says so."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(Qwen3Dense, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "'a' more than once"),
        ("[" * 10**6, "is not JSON"),
        ('{"a": "' + "x" * 2**20, "is not JSON"),
    ],
)
def test_hostile_configs_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """Duplicate keys, endless nesting and endless text are refused like any broken file."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(Qwen3Dense, tmp_path)


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    """A pipe in place of a config is refused at once, without waiting for a writer."""
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"config\.json can't be read \(it is not a regular file\)"):
        read_config(Qwen3Dense, tmp_path)


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    """A folder without config.json, and a missing path, are refused by name."""
    for path in (tmp_path, tmp_path / "other.json"):
        with pytest.raises(UserError, match="can't be read"):
            read_config(Qwen3Dense, path)
