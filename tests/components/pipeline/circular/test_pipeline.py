"""The circular pipeline against the same blocks in sequence."""

import gc
import weakref
from typing import Any, get_args

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from drawloom.components.pipeline.circular.pipeline import CircularPipeline, blocks_of, stages_of_rank
from drawloom.components.pipeline.circular.ring import Ring
from drawloom.components.pipeline.circular.stacked_blocks import Remat
from drawloom.components.ports.model import LayerRange
from support.circular import (
    EXACT,
    Block,
    Setup,
    SharingBlock,
    assert_same,
    gradient,
    loss_of,
    pipelined,
    sequential,
    split,
)
from support.qwen3 import dense, losses_of, one_document, whole

SETUPS = [
    Setup(stages, rounds * stages, repeats, delayed)
    for stages in (1, 2, 3, 4)
    for delayed in (False, True)
    for rounds in range(1 + delayed, 5)
    for repeats in (1, 2, 3)
]


@pytest.mark.parametrize("setup", SETUPS, ids=repr)
def test_outputs_and_gradients_are_those_of_the_blocks_in_order(setup: Setup) -> None:
    """A pipeline of any size computes what its blocks compute in sequence."""
    assert_same(pipelined(setup), sequential(setup))


@given(
    st.sampled_from(SETUPS),
    st.sampled_from(["nothing", "everything", "all_but_products"]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=25)
def test_batching_and_remat_do_not_change_results(setup: Setup, remat: Remat, batched: bool, sharing: bool) -> None:
    """Batched or sequential, recomputed or not, with shared values and side outputs or not, results are the same."""
    setup = attrs.evolve(setup, remat=remat, batched=batched, sharing=sharing)
    assert_same(pipelined(setup), sequential(setup))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("remat", get_args(Remat))
def test_without_gradients_the_outputs_are_the_same(mode: Any, remat: Remat) -> None:
    """A pass without gradients keeps no graph and gives the same outputs."""
    setup = Setup(2, 4, 2, remat=remat)
    with mode():
        outputs = setup.pipeline(setup.blocks())(setup.inputs())
    assert not outputs.requires_grad
    torch.testing.assert_close(outputs, sequential(setup).outputs, **EXACT)


def test_frozen_blocks_pass_gradients_on() -> None:
    """Without a parameter to train, inputs still get their gradients."""
    setup = Setup(2, 4, 2)
    inputs = setup.inputs().requires_grad_()
    pipeline = setup.pipeline([block.requires_grad_(False) for block in setup.blocks()])
    torch.autograd.backward(loss_of(pipeline(inputs), {}))
    torch.testing.assert_close(gradient(inputs), sequential(setup).inputs, **EXACT)
    assert all(parameter.grad is None for parameter in pipeline.parameters())


def test_the_graph_is_freed_with_the_outputs() -> None:
    """When the outputs are deleted, the graph is freed without a garbage collection."""
    setup = Setup(3, 6, 2, delayed=True, sharing=True)
    inputs = setup.inputs().requires_grad_()
    outputs, sides = split(setup.pipeline(setup.blocks())(inputs, setup.shared()))
    node = outputs.grad_fn
    assert node is not None
    alive = weakref.ref(node.next_functions[0][0])
    gc.disable()
    try:
        del outputs, sides, node
        assert alive() is None
    finally:
        gc.enable()


def test_numbers_that_do_not_divide_are_refused() -> None:
    """Wrong numbers of ranks, microbatches and shared rows are errors that name numbers to write instead."""
    with pytest.raises(ValueError, match="5 stages can't be divided evenly among 2 ranks; write 4"):
        stages_of_rank(5, Ring(0, 2))
    with pytest.raises(ValueError, match="1 stages can't be divided evenly among 2 ranks; write 2"):
        stages_of_rank(1, Ring(0, 2))
    with pytest.raises(ValueError, match="3 blocks can't be divided evenly among 2 stages; give 2 or 4"):
        CircularPipeline([Block(), Block(), Block()], 2)
    pipeline = CircularPipeline([SharingBlock(), SharingBlock()], 2, delayed=True)
    with pytest.raises(ValueError, match="write 4, or no delay"):
        pipeline(Setup(2, 2).inputs(), Setup(2, 2, sharing=True).shared())
    with pytest.raises(ValueError, match=r"a row for each of 4 microbatches, but one is \(6, 2, 3\)"):
        pipeline(Setup(2, 4).inputs(), Setup(2, 6, sharing=True).shared())


def test_a_rank_holds_the_blocks_of_its_stages() -> None:
    """With 4 stages on 2 ranks, each rank holds the blocks of 2 consecutive stages in every repeat."""
    assert [blocks_of(4, 2, Ring(rank, 2)) for rank in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_language_model_runs_in_a_circular_pipeline() -> None:
    """The layers of a Qwen3 as a pipeline, between its embedding and its head, give its losses and its gradients."""
    model = dense(num_hidden_layers=4)
    module = whole(model).double()
    tokens = torch.randint(0, 29, (4, 2, 5), generator=torch.Generator().manual_seed(3))
    shared, targets = one_document(8, 5), tokens.roll(-1, 2).flatten(0, 1)
    losses_of(module, tokens.flatten(0, 1), shared, targets).sum().backward()
    parts = [model.build(LayerRange(n, n + 1, embedding=False, head=False)).double() for n in range(4)]
    for number, part in enumerate(parts):
        part.load_state_dict(module.state_dict(), strict=False)
        decoder = part.get_submodule("model")
        decoder.layers = nn.ModuleDict({"0": decoder.get_submodule(f"layers.{number}")})
    pipeline = CircularPipeline(parts, 2, batched=False)
    rows = attrs.evolve(
        shared, positions=shared.positions.view(4, 2, 5), document_ids=shared.document_ids.view(4, 2, 5)
    )
    hidden = pipeline(module.get_submodule("model.embed_tokens")(tokens.flatten(0, 1)).unflatten(0, (4, 2)), rows)
    head = model.build(LayerRange(4, 4, embedding=False, head=True)).double()
    head.load_state_dict(module.state_dict(), strict=False)
    losses_of(head, hidden.flatten(0, 1), shared, targets).sum().backward()
    stacked = gradient(pipeline.get_parameter("block.model.layers.0.self_attn.q_proj.weight")).flatten(0, 1)
    for number in range(4):
        expected = gradient(module.get_parameter(f"model.layers.{number}.self_attn.q_proj.weight"))
        torch.testing.assert_close(stacked[number], expected, rtol=1e-9, atol=1e-9)
