"""Settings of a model in a recipe, and the problems `check` reports for them."""

import json
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from drawloom.components.model.decoder.builder import (
    DecoderBuilder,
    build_architecture_from_settings,
    find_setting_faults,
)
from drawloom.components.model.decoder.rope import RopeScaling
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.graph import UserError
from drawloom.graph.project import Recipe
from support.qwen3 import SIZES, SPARSE_SIZES, cpu_kernels, dense, sparse

NONE = dict.fromkeys((*Qwen3Dense.keys, "rope_parameters")) | {"config": None, "vocabulary_multiple": 1}


Found = list[tuple[str | tuple[str, ...], str, str]]


def faults_of(tokenizer: bool = False, **settings: Any) -> Found:
    return [
        (fault.key, fault.why, fault.instead) for fault in find_setting_faults(Qwen3Dense, NONE | settings, tokenizer)
    ]


def test_sizes_that_fit_have_no_problem() -> None:
    """Ordinary sizes have no problem, with and without the settings that have a default."""
    assert faults_of(**SIZES) == []
    assert (
        faults_of(tokenizer=True, num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=4) == []
    )


def test_head_settings_have_defaults() -> None:
    """Without num_key_value_heads each head has its own; without head_dim the heads share the width."""
    architecture = build_architecture_from_settings(
        Qwen3Dense,
        NONE
        | {
            "num_hidden_layers": 1,
            "hidden_size": 24,
            "num_attention_heads": 3,
            "intermediate_size": 4,
            "vocab_size": 9,
        },
        None,
    )
    assert (architecture.num_key_value_heads, architecture.head_dim, architecture.tie_word_embeddings) == (
        3,
        8,
        False,
    )
    assert (
        architecture.rope_theta,
        architecture.rms_norm_eps,
        architecture.initializer_range,
        architecture.max_position_embeddings,
    ) == (
        1e6,
        1e-6,
        0.02,
        32768,
    )


def test_all_missing_settings_are_reported_at_once() -> None:
    """An empty table has one problem for each required setting."""
    assert [key for key, _, _ in faults_of()] == [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
    ]


def test_key_heads_must_divide_heads() -> None:
    """If num_key_value_heads does not divide the heads, the hint lists the divisors."""
    [(key, why, instead)] = faults_of(**(SIZES | {"num_attention_heads": 6, "num_key_value_heads": 4}))
    assert (key, why, instead) == (
        "num_key_value_heads",
        "num_key_value_heads = 4 does not divide num_attention_heads = 6",
        "write one of 1, 2, 3, 6",
    )


def test_an_odd_head_is_refused() -> None:
    """Rotary positions need an even head_dim, whether written or derived from the width."""
    assert [key for key, _, _ in faults_of(**(SIZES | {"head_dim": 7}))] == ["head_dim"]
    assert [key for key, _, _ in faults_of(**(SIZES | {"hidden_size": 20, "head_dim": None}))] == ["head_dim"]


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    """Without head_dim, heads must divide the width."""
    assert [key for key, _, _ in faults_of(**(SIZES | {"hidden_size": 25, "head_dim": None}))] == [
        "num_attention_heads"
    ]
    assert faults_of(**(SIZES | {"hidden_size": 25})) == []


STRETCHES: list[tuple[RopeScaling, tuple[str | tuple[str, ...], str, str]]] = [
    (
        RopeScaling(rope_type="linear", factor=2.0, low_freq_factor=1.0),
        (
            ("rope_scaling", "low_freq_factor"),
            "rope_scaling.low_freq_factor belongs to llama3, and this is linear",
            "remove low_freq_factor",
        ),
    ),
    (
        RopeScaling(rope_type="dynamic", factor=2.0, original_max_position_embeddings=9),
        (
            ("rope_scaling", "original_max_position_embeddings"),
            "rope_scaling.original_max_position_embeddings belongs to yarn, llama3 and longrope, and this is dynamic",
            "remove original_max_position_embeddings",
        ),
    ),
    (
        RopeScaling(rope_type="yarn", factor=2.0),
        (
            "rope_scaling",
            "rope_scaling lacks original_max_position_embeddings, which yarn needs",
            "write original_max_position_embeddings = 32768, for example",
        ),
    ),
    (
        RopeScaling(rope_type="yarn", factor=2.0, original_max_position_embeddings=9, beta_slow=40.0),
        (
            ("rope_scaling", "beta_slow"),
            "rope_scaling.beta_fast = 32 is not above beta_slow = 40",
            "write beta_fast = 80",
        ),
    ),
    (
        RopeScaling(
            rope_type="longrope", original_max_position_embeddings=9, short_factor=[1.0] * 4, long_factor=[1.0] * 3
        ),
        (
            ("rope_scaling", "long_factor"),
            "rope_scaling.long_factor has 3 numbers, and 4 pairs of channels are rotated",
            "write 4 numbers",
        ),
    ),
    (
        RopeScaling(rope_type="llama3", factor=2.0, original_max_position_embeddings=9, high_freq_factor=1.0),
        (
            ("rope_scaling", "high_freq_factor"),
            "rope_scaling.high_freq_factor = 1 is not above low_freq_factor = 1",
            "write high_freq_factor = 2",
        ),
    ),
]


@pytest.mark.parametrize(("rope", "fault"), STRETCHES)
def test_an_invalid_rope_scaling_is_refused(rope: RopeScaling, fault: tuple[str | tuple[str, ...], str, str]) -> None:
    """The keys of a scaling must belong to its rope_type, and be complete."""
    assert faults_of(**SIZES | {"rope_scaling": rope}) == [fault]


@pytest.mark.parametrize("kind", ["ntk", "dynamic"])
def test_ntk_scaling_needs_more_than_one_pair(kind: Literal["ntk", "dynamic"]) -> None:
    """NTK scaling, static or dynamic, leaves the first pair unchanged, so there must be another pair."""
    rope = RopeScaling(rope_type=kind, factor=2.0)
    assert faults_of(**SIZES | {"rope_scaling": rope}) == []
    assert [key for key, _, _ in faults_of(**SIZES | {"rope_scaling": rope, "head_dim": 2})] == [
        ("rope_scaling", "rope_type")
    ]


def test_both_forms_of_rotary_positions_are_equal() -> None:
    """`rope_parameters` equals `rope_theta` with `rope_scaling`; a base inside `rope_scaling` counts too."""
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    apart = build_architecture_from_settings(
        Qwen3Dense, NONE | SIZES | {"rope_theta": 5e2, "rope_scaling": RopeScaling(**yarn)}, None
    )
    for key in ("rope_parameters", "rope_scaling"):
        joined = {key: RopeScaling(**yarn, rope_theta=5e2)}
        assert build_architecture_from_settings(Qwen3Dense, NONE | SIZES | joined, None) == apart
    plain = build_architecture_from_settings(
        Qwen3Dense, NONE | SIZES | {"rope_parameters": RopeScaling(rope_theta=5e2)}, None
    )
    assert (plain.rope_theta, plain.rope_scaling) == (5e2, None)


def test_rotary_positions_given_twice_are_refused() -> None:
    """Both forms at once, or two bases, are problems of the key to remove."""
    rope = RopeScaling(rope_type="linear", factor=2.0, rope_theta=5e2)
    both = faults_of(**SIZES, rope_parameters=rope, rope_theta=5e2, rope_scaling=RopeScaling())
    assert [(key, instead) for key, _, instead in both] == [
        ("rope_theta", "remove rope_theta or rope_parameters"),
        ("rope_scaling", "remove rope_scaling or rope_parameters"),
    ]
    [(key, why, _)] = faults_of(**SIZES, rope_theta=5e2, rope_scaling=rope)
    assert key == ("rope_scaling", "rope_theta") and "beside rope_theta" in why
    [(key, why, instead)] = faults_of(**SIZES, rope_parameters=RopeScaling(rope_type="linear"))
    assert (key, why, instead) == (
        "rope_parameters",
        "rope_parameters lacks factor, which linear needs",
        "write factor = 4.0, for example",
    )


def test_a_run_resumes_with_another_longest_text() -> None:
    """max_position_embeddings has no effect on training, except on positions beyond it if they are scaled."""

    @attrs.frozen
    class View:
        settings: dict[str, Any]

    rope = RopeScaling(rope_type="dynamic", factor=2.0)
    assert Qwen3Dense.resume_impact(View(NONE), "max_position_embeddings", None) is None
    dynamic = View(NONE | {"rope_scaling": rope})
    assert Qwen3Dense.resume_impact(dynamic, "max_position_embeddings", None) == "changes_training"
    assert Qwen3Dense.resume_impact(dynamic, "tie_word_embeddings", None) is None


def read(kind: type[DecoderBuilder], config: Path, **settings: Any) -> DecoderBuilder:
    """Return a model with the sizes in a file, except for these settings."""
    return kind(kernels=cpu_kernels(), config=config, **settings)


def test_sizes_are_set_over_a_config(tmp_path: Path) -> None:
    """All other values are the config's; sizes that do not fit together and a missing config are refused."""
    other = dense(tie_word_embeddings=True, rope_scaling=RopeScaling(rope_type="linear", factor=2.0))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(other.hugging_face_config()))
    over: Any = {"num_hidden_layers": 7, "tie_word_embeddings": False, "rope_theta": 500.0}
    architecture = read(Qwen3Dense, path, **over).architecture
    assert architecture == attrs.evolve(other.architecture, **over)
    plain = RopeScaling(rope_type="default", rope_theta=5e3)
    architecture = read(Qwen3Dense, path, rope_parameters=plain).architecture
    assert architecture == attrs.evolve(other.architecture, rope_theta=5e3, rope_scaling=None)
    assert faults_of(config=path, **over) == faults_of(config=tmp_path / "no.json") == []  # no file is read
    with pytest.raises(UserError, match=r"^num_key_value_heads: "):
        read(Qwen3Dense, path, num_key_value_heads=3).check_before_open()
    with pytest.raises(UserError, match=r"^config: .*no.json can't be read"):
        read(Qwen3Dense, tmp_path / "no.json").check_before_open()


def test_errors_at_run_time_equal_problems_of_check() -> None:
    """Without a recipe, using the component raises the message of `check`."""
    model = Qwen3Dense(kernels=cpu_kernels(), **(SIZES | {"num_key_value_heads": 3}))
    with pytest.raises(
        UserError, match="num_key_value_heads = 3 does not divide num_attention_heads = 4; write one of 1, 2, 4"
    ):
        _ = model.num_hidden_layers


def test_constraints_report_problems_of_the_node() -> None:
    """`check` reports these problems through `constraints`, each on its key."""

    @attrs.frozen
    class View:
        settings: dict[str, Any]

        def neighbour(self, edge: str) -> None:
            return None

        def problem(self, key: str, text: str, hint: str) -> Any:
            return key, text, hint

    architecture = list(Qwen3Dense.constraints(View(NONE | SIZES | {"num_key_value_heads": 3, "vocab_size": None})))
    assert [fault[0] for fault in architecture] == ["vocab_size", "num_key_value_heads"]  # type: ignore[index]


def test_a_config_sets_all_sizes(tmp_path: Path) -> None:
    """A model built from another model's exported config has the same sizes."""
    other = dense(tie_word_embeddings=True, rope_theta=500.0, rms_norm_eps=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(other.hugging_face_config()))
    for config in (tmp_path, tmp_path / "config.json"):
        assert read(Qwen3Dense, config).architecture == other.architecture


NO_EXPERTS = dict.fromkeys((*Qwen3Moe.keys, "rope_parameters")) | {"config": None, "vocabulary_multiple": 1}


def faults_of_experts(**settings: Any) -> Found:
    architecture = find_setting_faults(Qwen3Moe, NO_EXPERTS | settings, False)
    return [(fault.key, fault.why, fault.instead) for fault in architecture]


def test_experts_that_fit_have_no_problem() -> None:
    """Sizes that fit have no problem; without dense layers, intermediate_size may be left out."""
    assert faults_of_experts(**SPARSE_SIZES) == []
    assert faults_of_experts(**SPARSE_SIZES | {"intermediate_size": None}) == []
    assert faults_of_experts(**SPARSE_SIZES | {"mlp_only_layers": [1]}) == []
    architecture = build_architecture_from_settings(
        Qwen3Moe, NO_EXPERTS | SPARSE_SIZES | {"intermediate_size": None, "mlp_only_layers": []}, None
    )
    assert architecture.intermediate_size == 2 * 12  # as many channels as a token has in its experts


def test_all_missing_settings_of_experts_are_reported() -> None:
    """An empty table has one problem for each required setting."""
    needed = [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "vocab_size",
    ]
    assert [key for key, _, _ in faults_of_experts()] == needed


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"num_experts_per_tok": 6},
            ("num_experts_per_tok", "num_experts_per_tok = 6 is more than num_experts = 5", "write 5, or less"),
        ),
        (
            {"mlp_only_layers": [0, 2]},
            ("mlp_only_layers", "mlp_only_layers names layer 2, and layers are counted from 0 to 1", "remove 2"),
        ),
        (
            {"mlp_only_layers": [0, 1]},
            ("mlp_only_layers", "no layer has experts", 'write less, or use = "model.qwen3.dense"'),
        ),
        (
            {"decoder_sparse_step": 3},
            ("decoder_sparse_step", "no layer has experts", 'write less, or use = "model.qwen3.dense"'),
        ),
        (
            {"decoder_sparse_step": 2, "intermediate_size": None},
            (
                "intermediate_size",
                "intermediate_size is missing, and layer 0 has no experts",
                "write intermediate_size = 768, for example",
            ),
        ),
    ],
)
def test_contradictions_of_experts_are_reported(changes: dict[str, Any], fault: tuple[str, str, str]) -> None:
    """A contradiction is a problem of its key, and the hint gives a correct value."""
    assert faults_of_experts(**SPARSE_SIZES | changes) == [fault]


def test_balance_loss_can_be_set_beside_a_config(tmp_path: Path) -> None:
    """A recipe may set the coefficient of the balancing loss; experts that do not fit are a problem."""
    other = sparse(router_aux_loss_coef=0.5)
    (tmp_path / "config.json").write_text(json.dumps(other.hugging_face_config()))
    assert read(Qwen3Moe, tmp_path).architecture == other.architecture
    architecture: Any = read(Qwen3Moe, tmp_path, router_aux_loss_coef=0.0).architecture
    assert (architecture.router_aux_loss_coef, attrs.evolve(architecture, router_aux_loss_coef=0.5)) == (
        0.0,
        other.architecture,
    )
    read(Qwen3Moe, tmp_path, num_experts=5).check_before_open()
    with pytest.raises(UserError, match=r"^num_experts_per_tok: "):
        read(Qwen3Moe, tmp_path, num_experts=1).check_before_open()


def test_the_only_tokenizer_of_a_recipe_belongs_to_the_model() -> None:
    """
    Model and export find a single tokenizer by type; with two, the recipe must choose; without one there is no edge.
    """
    [problem] = Recipe.load("first_run", "tokenizer.use=data.byts").graph.errors
    assert problem.node == "tokenizer"  # and nothing of a model that lacks a tokenizer
    graph = Recipe.load("first_run").graph
    assert [graph.nodes[name].edges["tokenizer"].targets for name in ("model", "export")] == [("tokenizer",)] * 2
    assert graph.errors == []
    graph = Recipe.load("first_run", "other.use=data.bytes").graph
    hint = 'write tokenizer = "@tokenizer" or tokenizer = "@other"'
    assert {problem.node for problem in graph.errors if problem.hint == hint} >= {"model", "export"}
    graph = Recipe.load("first_run").with_values({"unset": ["tokenizer"]}).graph
    assert not any("tokenizer" in graph.nodes[name].edges for name in ("model", "export"))
    [problem] = [problem for problem in graph.errors if problem.node == "model"]
    assert problem.hint == "add a [tokenizer], or write the number of its ids: vocab_size = 50304, for example"


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 64),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 64),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 4}, 64),
    ],
)
def test_the_longest_text_follows_from_scaling(scaling: dict[str, Any] | None, longest: int) -> None:
    """It is max_position_embeddings, or the original length times the factor if this is longer."""
    rope = None if scaling is None else RopeScaling(**scaling)
    sizes = SIZES | {"max_position_embeddings": 64, "rope_scaling": rope}
    assert Qwen3Dense(kernels=cpu_kernels(), **sizes).max_sequence_length == longest


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 10**9), ("vocab_size", 10**10), ("num_attention_heads", 10**9)]
)
def test_impossible_sizes_in_a_config_are_refused_before_allocation(key: str, value: int, tmp_path: Path) -> None:
    """The problem names the key; lists of layers would take gigabytes."""
    config = Qwen3Dense(kernels=cpu_kernels(), **SIZES).hugging_face_config()
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=f"an invalid {key}: {value} is more than"):
        Qwen3Dense(kernels=cpu_kernels(), config=tmp_path).check_before_open()


def test_too_many_experts_over_all_layers_are_refused() -> None:
    """Both numbers are possible, but not their product: every expert is a tensor in files."""
    many = {"num_hidden_layers": 1001, "num_experts": 1000}
    assert [key for key, _, _ in faults_of_experts(**SPARSE_SIZES | many)] == ["num_experts"]
    assert [key for key, _, _ in faults_of_experts(**SPARSE_SIZES | {"num_experts": 1000})] == []
