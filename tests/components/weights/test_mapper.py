"""Mappers made of mappers, against doing the same by hand on all tensors at once."""

import os
import random
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.components.ports.weights import Mapper
from drawloom.components.weights.load import convert_tensors
from drawloom.components.weights.mapper import (
    chunk,
    concatenate,
    identity,
    parallel,
    rename,
    select_outputs,
    sequential,
    stack,
    transpose,
    unstack,
)


def in_turn(mappers: list[Mapper], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Apply the mappers in turn to all tensors, as the oracle; unused tensors stay."""
    for mapper in mappers:
        rest = {name: tensor for name, tensor in tensors.items() if name not in mapper.inputs}
        tensors = rest | convert_tensors(mapper, tensors)
    return tensors


def some_stage(draw: random.Random, names: list[str], number: int) -> tuple[Mapper, list[str]]:
    """Return a random mapper for some names (tensors with one shape), and the names after it."""
    names = draw.sample(names, len(names))
    first, second = f"{number}.a", f"{number}.b"
    mapper, given = draw.choice(
        [
            (rename({names[0]: first}), [first, *names[1:]]),
            (rename({names[0]: names[1], names[1]: names[0]}), names),
            (transpose(names[0], 0, 1), names),
            (sequential(stack(names[:2], "x"), unstack("x", [second, first])), [first, second, *names[2:]]),
            (sequential(concatenate(names[:2], "x"), chunk("x", [second, first])), [first, second, *names[2:]]),
            (Mapper(()), names),
        ]
    )
    return mapper, given


@given(seed=st.integers(0, 10**9), count=st.integers(1, 6))
def test_sequential_is_one_after_another(seed: int, count: int) -> None:
    """A chain gives the result of its members in turn, and its inverse gives the input back, bit by bit."""
    draw = random.Random(seed)
    names = ["p", "q", "r", "s"]
    tensors = {name: torch.randn(2, 2) for name in names}
    mappers = []
    for number in range(count):
        mapper, names = some_stage(draw, names, number)
        mappers.append(mapper)
    chain = sequential(*mappers)
    expected = in_turn(mappers, tensors)
    given = convert_tensors(chain, tensors)
    untouched = tensors.keys() - set(chain.inputs)
    assert given.keys() == expected.keys() - untouched
    assert all(torch.equal(given[name], expected[name]) for name in given)
    back = convert_tensors(chain.inverse(), given)
    assert back.keys() == tensors.keys() - untouched
    assert all(torch.equal(back[name], tensors[name]) for name in back)


@given(seed=st.integers(0, 10**9))
def test_groups_of_a_chain_are_independent(seed: int) -> None:
    """Groups of a chain convert alone and in any order to the same result."""
    draw = random.Random(seed)
    names = [f"n{number}" for number in range(8)]
    tensors = {name: torch.randn(2, 2) for name in names}
    mappers = []
    for number in range(4):
        mapper, names = some_stage(draw, names, number)
        mappers.append(mapper)
    chain = sequential(*mappers)
    expected = convert_tensors(chain, tensors)
    for group in draw.sample(chain.groups, len(chain.groups)):
        alone = convert_tensors(Mapper((group,)), {name: tensors[name] for name in group.inputs})
        assert all(torch.equal(alone[name], expected[name]) for name in group.outputs)
    assert sorted(chain.inputs) == sorted(set(chain.inputs))


def test_gaps_are_filled_both_ways() -> None:
    """Inputs known only to a later member are the chain's inputs; unconsumed outputs are its outputs."""
    chain = sequential(rename({"a": "b"}), rename({"c": "d"}))
    assert [(group.inputs, group.outputs) for group in chain.groups] == [(("a",), ("b",)), (("c",), ("d",))]


def test_groups_that_touch_are_one() -> None:
    """Groups are merged where a later member joins them, and only there."""
    chain = sequential(identity("a", "b", "c", "d"), stack(["a", "c"], "ac"), rename({"b": "e"}))
    assert [(group.inputs, group.outputs) for group in chain.groups] == [
        (("a", "c"), ("ac",)),
        (("b",), ("e",)),
        (("d",), ("d",)),
    ]


def test_a_member_may_pass_its_names_around() -> None:
    """Names swapped in one member do not get in one another's way."""
    swapped = convert_tensors(
        sequential(rename({"a": "b", "b": "a"}), identity("a")), {"a": torch.zeros(1), "b": torch.ones(1)}
    )
    assert {name: tensor.item() for name, tensor in swapped.items()} == {"b": 0, "a": 1}


def test_composing_no_mappers_gives_an_empty_mapper() -> None:
    """Composing only empty mappers gives an empty mapper."""
    assert sequential().groups == parallel().groups == sequential(Mapper(()), Mapper(())).groups == ()
    assert sequential(Mapper(()), rename({"a": "b"})).outputs == ["b"]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (rename({"a": "x"}), rename({"b": "x"}), "x would be an output of more than one"),
        (rename({"a": "x"}), rename({"a": "y"}), "a would be an input of more than one"),
    ],
)
def test_collisions_of_parallel_mappers_are_refused(first: Mapper, second: Mapper, message: str) -> None:
    """Two mappers can't take or give one tensor."""
    with pytest.raises(ValueError, match=message):
        parallel(first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [(rename({"a": "x"}), rename({"a": "y"})), (rename({"a": "x", "b": "c"}), rename({"c": "x"}))],
    ids=["taken before", "given before"],
)
def test_collisions_in_a_chain_are_refused(first: Mapper, second: Mapper) -> None:
    """A tensor can't pass where its name is taken or given."""
    with pytest.raises(ValueError, match="can't pass a tensor on"):
        sequential(first, second)


def test_selecting_outputs_keeps_whole_groups() -> None:
    """If one tensor in a group is wanted, the whole group comes."""
    mapper = parallel(unstack("ab", ["a", "b"]), identity("c"))
    assert select_outputs(mapper, ["b"]).outputs == ["a", "b"]
    assert select_outputs(mapper, []).groups == ()


def qwen_like_experts(layers: int, experts: int) -> tuple[Mapper, Mapper]:
    """Made-up mixtures of experts: modules one by one, and fused ones, to the same parameters of ours."""
    one_by_one, fused = [], []
    for layer in range(layers):
        ours, theirs = f"layers.{layer}.experts.", f"model.layers.{layer}.mlp.experts."
        kinds = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
        for name, their_name in kinds.items():
            parts = [f"{theirs}{number}.{their_name}.weight" for number in range(experts)]
            one_by_one.append(sequential(stack(parts, ours + name), transpose(ours + name, 1, 2)))
        joined = theirs + "gate_up_proj"
        both = chunk(joined, [ours + "gate", ours + "up"], 1)
        turned = parallel(transpose(ours + "gate", 1, 2), transpose(ours + "up", 1, 2))
        fused.append(parallel(sequential(both, turned), rename({theirs + "down_proj": ours + "down"})))
    return parallel(*one_by_one), parallel(*fused)


def test_both_layouts_of_experts_are_converted() -> None:
    """Experts one by one and fused become the same parameters, from which both layouts come back bit by bit."""
    one_by_one, fused = qwen_like_experts(layers=2, experts=3)
    theirs = {name: torch.randn(5, 4) if "down" not in name else torch.randn(4, 5) for name in one_by_one.inputs}
    ours = convert_tensors(one_by_one, theirs)
    assert {name: tuple(tensor.shape) for name, tensor in ours.items() if "layers.1" in name} == {
        "layers.1.experts.gate": (3, 4, 5),
        "layers.1.experts.up": (3, 4, 5),
        "layers.1.experts.down": (3, 5, 4),
    }
    assert torch.equal(ours["layers.1.experts.up"][2], theirs["model.layers.1.mlp.experts.2.up_proj.weight"].T)
    again = convert_tensors(one_by_one.inverse(), ours)
    assert all(torch.equal(again[name], theirs[name]) for name in theirs)
    joined = convert_tensors(fused.inverse(), ours)
    assert joined["model.layers.0.mlp.experts.gate_up_proj"].shape == (3, 10, 4)
    ours_again = convert_tensors(fused, joined)
    assert all(torch.equal(ours_again[name], ours[name]) for name in ours)


ORDER = """
from drawloom.components.weights.mapper import parallel, sequential
from drawloom.components.weights.mapper import *
names = [f"layers.{n}.{kind}" for n in range(20) for kind in ("q", "k", "v")]
renamed = rename({name: name.replace("layers", "m") for name in names})
joined = parallel(*(stack([f"m.{n}.{kind}" for kind in "qkv"], f"m.{n}") for n in range(0, 20, 2)))
mappers = sequential(renamed, joined), sequential(renamed)
print([(g.inputs, g.outputs) for mapper in mappers for g in mapper.groups])
"""


def test_order_is_the_same_in_every_process() -> None:
    """A process with other string hashes has the same groups in the same order."""
    paths = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    first = subprocess.check_output([sys.executable, "-c", ORDER], env=os.environ | paths, text=True, timeout=60)
    with redirect_stdout(StringIO()) as second:
        exec(ORDER, {})
    assert first == second.getvalue()
    assert first.count("layers.19.q") == 2 and "('m.0.q', 'm.0.k', 'm.0.v')" not in first
    assert "('layers.0.q', 'layers.0.k', 'layers.0.v'), ('m.0',)" in first


def test_many_groups_take_little_time() -> None:
    """A model of a hundred thousand experts is composed in a moment: cost grows with the number of names."""
    names = [f"layers.{n}.experts.{e}" for n in range(100) for e in range(300)]
    renamed = rename({name: name.replace("layers", "m").replace(".experts", "") for name in names})
    joined = parallel(*(stack([f"m.{n}.{e}" for e in range(300)], f"m.{n}") for n in range(100)))
    assert len(sequential(renamed, joined).groups) == 100
