"""Integer settings that determine memory have an upper bound: `check` rejects larger values before any allocation."""

import typing
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from drawloom.graph import RecipeError
from drawloom.graph.project import Recipe
from drawloom.graph.registry.registry import Registry

HUGE = 10**30

UNBOUNDED = {
    "a number of steps, tokens or events that is only compared": {
        *("every", "keep", "keep_every", "failures", "until_step", "until_tokens", "steps", "max_skipped_steps"),
        *("warmup_steps", "warmup_tokens", "decay_steps", "decay_tokens", "timescale", "window", "go_back"),
        *("wait", "warmup", "active", "repeat", "patience", "tokens", "neighbour_every", "update_every"),
    },
    "a limit above which there is nothing to limit": {
        *("rows_used", "max_shard", "top_k", "queue_size", "bucket_bytes", "recompute", "sliding_window"),
        "slot_bytes",
    },
    "a number of layers or groups that is compared with the model's": {
        *("first_k_dense_replace", "max_window_layers", "decoder_sparse_step", "n_group", "topk_group"),
        *("embedding_layer_cost", "head_layer_cost"),
    },
}
"""Reason -> names of settings without an upper bound."""


def find_unbounded(name: str, kind: Any, check: Any) -> Iterator[str]:
    """Yield the names of a setting's unbounded integers, also within its tables."""
    if (kind is int or int in typing.get_args(kind)) and not (check and check(HUGE)):
        yield name
    for table in filter(attrs.has, (kind, *typing.get_args(kind))):
        types = typing.get_type_hints(table)
        for field in attrs.fields(table):
            yield from find_unbounded(field.name, types.get(field.name, field.type), field.metadata.get("check"))


def test_every_size_has_an_upper_bound() -> None:
    """Integer settings reject a huge value, or are listed with a reason; the list has no other names."""
    registry, unbounded = Registry.from_package("drawloom.components"), set[str]()
    for use in registry.names():
        spec = registry.require(use)
        for field in (field for field in spec.fields.values() if field.kind == "setting"):
            unbounded.update(find_unbounded(field.name, field.type, field.check))
    assert unbounded == set.union(*UNBOUNDED.values())


@pytest.mark.parametrize(
    "words",
    [
        ["sample.tokens=1000000000000"],
        ["sample.context=1000000000000"],
        ["model.max_position_embeddings=1000000000000"],
        ["metrics.classes={use='metrics.classification', classes=1000000000000}"],
        ["metrics.spread={use='metrics.spread', of='loss', bins=1000000000000}"],
        ["order={use='data.order.sorted_buffers', buffer=1000000000000, pack=4}"],
        ["data.lengths=[{length=1000000000000, until_step=3}]"],
    ],
)
def test_check_rejects_sizes_beyond_any_machine(words: list[str]) -> None:
    """`check` rejects the value with a message that has the value and the largest allowed one."""
    with pytest.raises(RecipeError, match=r"1000000000000 is more than \d+ \(DL303\)"):
        Recipe.load("first_run", *words).check(skip_machine_checks=True)
