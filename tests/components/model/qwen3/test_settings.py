"""What a recipe can say of a model, and what it can't."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.model.qwen3.family import DENSE, SPARSE
from drawloom.components.model.qwen3.moe import Qwen3Sparse
from drawloom.components.model.qwen3.rope_scaling import RopeScaling
from drawloom.components.model.qwen3.settings import choose_architecture, faults
from drawloom.graph import UserError
from support.qwen3 import SIZES, SPARSE_SIZES, cpu_kernels

NONE = dict.fromkeys(DENSE.settings) | {"config": None, "vocabulary_multiple": 1}


Found = list[tuple[str | tuple[str, ...], str, str]]


def faults_of(tokenizer: bool = False, **settings: Any) -> Found:
    return [(fault.key, fault.why, fault.instead) for fault in faults(DENSE, NONE | settings, tokenizer)]


def test_sizes_that_fit() -> None:
    """Ordinary sizes have no fault, with and without what has a default."""
    assert faults_of(**SIZES) == []
    assert faults_of(tokenizer=True, layers=1, width=8, heads=2, feed_forward=4) == []


def test_defaults() -> None:
    """Without kv_heads each head has its own, without head_dim the heads share the width."""
    found = choose_architecture(
        DENSE, NONE | {"layers": 1, "width": 24, "heads": 3, "feed_forward": 4, "vocabulary": 9}, None
    )
    assert (found.kv_heads, found.head_dim, found.tied) == (3, 8, False)
    assert (found.rope_base, found.norm_eps, found.initial_std, found.max_positions) == (1e6, 1e-6, 0.02, 32768)


def test_everything_missing_is_told_at_once() -> None:
    """An empty table is told of each setting that it needs."""
    assert [key for key, _, _ in faults_of()] == ["layers", "width", "heads", "feed_forward", "vocabulary"]


def test_key_heads_divide_heads() -> None:
    """kv_heads that do not divide heads are refused with those that do."""
    [(key, why, instead)] = faults_of(**(SIZES | {"heads": 6, "kv_heads": 4}))
    assert (key, why, instead) == ("kv_heads", "kv_heads = 4 does not divide heads = 6", "write one of 1, 2, 3, 6")


def test_odd_head() -> None:
    """Rotary positions need an even head_dim, whether it is written or follows from the width."""
    assert [key for key, _, _ in faults_of(**(SIZES | {"head_dim": 7}))] == ["head_dim"]
    assert [key for key, _, _ in faults_of(**(SIZES | {"width": 20, "head_dim": None}))] == ["head_dim"]


def test_width_that_heads_do_not_divide() -> None:
    """Without head_dim, heads must divide the width."""
    assert [key for key, _, _ in faults_of(**(SIZES | {"width": 25, "head_dim": None}))] == ["heads"]
    assert faults_of(**(SIZES | {"width": 25})) == []


STRETCHES: list[tuple[RopeScaling, tuple[str | tuple[str, ...], str, str]]] = [
    (
        RopeScaling(kind="linear", factor=2.0, low=1.0),
        (("rope_scaling", "low"), "rope_scaling.low belongs to llama3, and this is linear", "remove low"),
    ),
    (
        RopeScaling(kind="dynamic", factor=2.0, trained_positions=9),
        (
            ("rope_scaling", "trained_positions"),
            "rope_scaling.trained_positions belongs to yarn and llama3, and this is dynamic",
            "remove trained_positions",
        ),
    ),
    (
        RopeScaling(kind="yarn", factor=2.0),
        (
            "rope_scaling",
            "rope_scaling lacks trained_positions, which yarn needs",
            "write trained_positions = 32768, say",
        ),
    ),
    (
        RopeScaling(kind="yarn", factor=2.0, trained_positions=9, slow=40.0),
        (("rope_scaling", "slow"), "rope_scaling.fast = 32 is not above slow = 40", "write fast = 80"),
    ),
    (
        RopeScaling(kind="llama3", factor=2.0, trained_positions=9, high=1.0),
        (("rope_scaling", "high"), "rope_scaling.high = 1 is not above low = 1", "write high = 2"),
    ),
]


@pytest.mark.parametrize(("rope", "fault"), STRETCHES)
def test_stretched_positions(rope: RopeScaling, fault: tuple[str | tuple[str, ...], str, str]) -> None:
    """What a stretch is told must belong to its kind, and be all that it needs."""
    assert faults_of(**SIZES | {"rope_scaling": rope}) == [fault]


def test_one_pair_can_not_be_stretched_dynamically() -> None:
    """Dynamic scaling leaves the first pair alone, so there must be another."""
    rope = RopeScaling(kind="dynamic", factor=2.0)
    assert faults_of(**SIZES | {"rope_scaling": rope}) == []
    assert [key for key, _, _ in faults_of(**SIZES | {"rope_scaling": rope, "head_dim": 2})] == [
        ("rope_scaling", "kind")
    ]


def test_resuming_with_another_longest_text() -> None:
    """It is a claim alone, and changes what is learned only where positions beyond it are stretched."""

    @attrs.frozen
    class View:
        settings: dict[str, Any]

    rope = RopeScaling(kind="dynamic", factor=2.0)
    assert Qwen3Dense.weigh_change(View(NONE), "max_positions") is None
    assert Qwen3Dense.weigh_change(View(NONE | {"rope_scaling": rope}), "max_positions") == "semantic"
    assert Qwen3Dense.weigh_change(View(NONE | {"rope_scaling": rope}), "tied") is None


def test_config_beside_sizes(tmp_path: Path) -> None:
    """Each size beside a config is a fault; so is a config that can't be read, in the same report."""
    found = faults_of(config=tmp_path / "config.json", layers=2, tied=False)
    assert [key for key, _, _ in found] == ["layers", "tied", "config"]
    assert found[0][1:] == ("layers stands beside config, which gives it too", "remove layers or config")


def test_errors_at_run_time_say_the_same() -> None:
    """Without a recipe, use raises what check would have said."""
    model = Qwen3Dense(kernels=cpu_kernels(), **(SIZES | {"kv_heads": 3}))
    with pytest.raises(UserError, match="kv_heads = 3 does not divide heads = 4; write one of 1, 2, 4"):
        _ = model.layers


def test_constraints_are_faults_of_the_node() -> None:
    """check sees these faults through `constraints`, on the keys that they concern."""

    @attrs.frozen
    class View:
        settings: dict[str, Any]

        def neighbours(self, edge: str) -> list[Any]:
            return []

        def fault(self, key: str, text: str, hint: str) -> Any:
            return key, text, hint

    found = list(Qwen3Dense.constraints(View(NONE | SIZES | {"kv_heads": 3, "vocabulary": None})))
    assert [fault[0] for fault in found] == ["vocabulary", "kv_heads"]  # type: ignore[index]


def test_config_gives_all_sizes(tmp_path: Path) -> None:
    """A model from the config that another exports is that other model."""
    other = Qwen3Dense(kernels=cpu_kernels(), tied=True, rope_base=500.0, norm_eps=1e-5, **SIZES)
    (tmp_path / "config.json").write_text(json.dumps(other.hugging_face_config()))
    for config in (tmp_path, tmp_path / "config.json"):
        assert Qwen3Dense(kernels=cpu_kernels(), config=config).architecture == other.architecture


NO_EXPERTS = dict.fromkeys(SPARSE.settings) | {"config": None, "vocabulary_multiple": 1}


def faults_of_experts(**settings: Any) -> Found:
    found = faults(SPARSE, NO_EXPERTS | settings, False)
    return [(fault.key, fault.why, fault.instead) for fault in found]


def test_experts_that_fit() -> None:
    """Sizes that fit have no fault; without layers of another kind, feed_forward may be left out."""
    assert faults_of_experts(**SPARSE_SIZES) == []
    assert faults_of_experts(**SPARSE_SIZES | {"feed_forward": None}) == []
    assert faults_of_experts(**SPARSE_SIZES | {"dense_layers": [1]}) == []
    found = choose_architecture(SPARSE, NO_EXPERTS | SPARSE_SIZES | {"feed_forward": None, "dense_layers": []}, None)
    assert found.feed_forward == 2 * 12  # as many channels as a token has in its experts


def test_everything_of_experts_that_is_missing_is_told() -> None:
    """An empty table is told of each setting that it needs."""
    needed = ["layers", "width", "heads", "experts", "experts_per_token", "expert_feed_forward", "vocabulary"]
    assert [key for key, _, _ in faults_of_experts()] == needed


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"experts_per_token": 6},
            ("experts_per_token", "experts_per_token = 6 is more than experts = 5", "write 5, or less"),
        ),
        (
            {"dense_layers": [0, 2]},
            ("dense_layers", "dense_layers names layer 2, and layers are counted from 0 to 1", "remove 2"),
        ),
        (
            {"dense_layers": [0, 1]},
            ("dense_layers", "no layer has experts", 'write less, or use = "model.qwen3.dense"'),
        ),
        (
            {"sparse_step": 3},
            ("sparse_step", "no layer has experts", 'write less, or use = "model.qwen3.dense"'),
        ),
        (
            {"sparse_step": 2, "feed_forward": None},
            ("feed_forward", "feed_forward is missing, and layer 0 has no experts", "write feed_forward = 768, say"),
        ),
    ],
)
def test_faults_of_experts(changes: dict[str, Any], fault: tuple[str, str, str]) -> None:
    """What can't go together is told on the key that it concerns, with what to write instead."""
    assert faults_of_experts(**SPARSE_SIZES | changes) == [fault]


def test_balance_may_stand_beside_a_config(tmp_path: Path) -> None:
    """What the loss that spreads tokens weighs is the recipe's to say; all that makes the model is the config's."""
    other = Qwen3Sparse(kernels=cpu_kernels(), balance=0.5, **SPARSE_SIZES)
    (tmp_path / "config.json").write_text(json.dumps(other.hugging_face_config()))
    assert Qwen3Sparse(kernels=cpu_kernels(), config=tmp_path).architecture == other.architecture
    found: Any = Qwen3Sparse(kernels=cpu_kernels(), config=tmp_path, balance=0.0).architecture
    assert (found.balance, attrs.evolve(found, balance=0.5)) == (0.0, other.architecture)
    assert [key for key, _, _ in faults_of_experts(config=tmp_path, balance=0.0, experts=5)] == ["experts"]
