"""Compiled blocks, and `check`'s messages about them."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import drawloom
from drawloom.components.pipeline.split_backward.split_backward import SplitBackward
from drawloom.components.ports.model import Head, LayerRange, TokenContext
from drawloom.components.ports.stages import Recompute
from drawloom.components.stages.compiled import CompiledBlocks
from drawloom.kernels.recompute.policy import apply_recompute_policy, make_recomputable
from support.qwen3 import cpu_kernels, dense, sparse

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer


def built(compiled: bool) -> Any:
    """Return a model of three layers."""
    kernels = cpu_kernels()
    kernels.open()
    model = dense(num_hidden_layers=3, kernels=kernels)
    module = model.build(LayerRange(0, 3, embedding=True, head=True))
    for name, parameter in module.named_parameters():
        model.initialize_parameter(name, parameter, 1)
    if compiled:
        feature = CompiledBlocks(kernels=kernels)
        feature.open()
        feature.finish([module], model.blocks(module))
    make_recomputable(model.blocks(module))
    return module


def test_tokens_that_travel_are_not_compiled() -> None:
    """How many a rank gets is known at run time only: experts of several ranks are left to Python, others are not."""
    for dispatcher in (None, object()):
        model: Any = sparse()
        block: Any = model.blocks(model.build(LayerRange(0, 1, embedding=True, head=False)))[0]
        block.mlp.experts.dispatcher = dispatcher
        CompiledBlocks(kernels=cpu_kernels()).finish([], [block])
        assert hasattr(block.mlp.experts.forward, "_torchdynamo_disable") == (dispatcher is not None)


def test_a_run_compiles_every_layer(tmp_path: Path) -> None:
    """Stages in a recipe with the node, and in no other, ask torch to compile all layers."""
    for words, layers in (("compile.use=stages.compiled",), 2), ((), 0):
        recipe = drawloom.Recipe.load("first_run", "model.num_hidden_layers=2", f"folder.path={tmp_path}", *words)
        with (
            mock.patch.object(torch, "compile", side_effect=lambda forward: forward) as compiled,
            recipe.open(only="stages"),
        ):
            assert compiled.call_count == layers


def loss_of(module: Any, policy: Recompute) -> Any:
    """Return the loss of some tokens under a policy of recomputation."""
    tokens = torch.arange(12).view(2, 6)
    shared = TokenContext(torch.arange(6).expand(2, 6), torch.zeros_like(tokens), torch.ones(tokens.shape))

    def finish(hidden: Any, head: Head) -> Any:
        return head.token_losses(hidden, tokens, shared.weights)[0].sum()

    with apply_recompute_policy(policy):
        return module(tokens, shared, finish)


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record an entry for every compiled graph."""
    input_counts: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        input_counts.append(len(inputs))
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    return input_counts


@pytest.mark.parametrize("policy", ["none", "blocks", "selective"])
def test_compiled_blocks_share_one_graph_and_have_the_gradients(policy: Any, frames: list[int]) -> None:
    """Three blocks are one graph without a break; the gradients equal eager blocks', recomputed or not."""
    grads = []
    for compiled in (False, True):
        module = built(compiled)
        loss_of(module, policy).backward()
        grads.append([parameter.grad for parameter in module.parameters()])
    assert len(frames) == 1
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_compiled_block_can_be_split(frames: list[int]) -> None:
    """Both passes together give the gradients of one, though the second has less to do."""
    module = built(True)
    loss_of(module, "none").backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    split = SplitBackward()
    with split.forward_context():
        output = loss_of(module, "none")
    split.backward_input([output], None, [])
    split.backward_weight()
    for parameter, grad in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def warnings_of(*words: str) -> list[str]:
    """Return `check`'s warnings on a pipeline's stages."""
    recipe = drawloom.Recipe.load("first_run", *words)
    return [
        str(problem)
        for problem in recipe.graph.problems
        if problem.warning and ("[stages]" in str(problem) or "[compile]" in str(problem))
    ]


ZERO_BUBBLE = "schedule.use=pipeline.schedules.zero_bubble_v"


def test_check_warns_of_compiled_blocks_under_split_backward() -> None:
    """A schedule with W and compiled blocks is a warning; so is a policy that compiled blocks do not follow."""
    assert warnings_of(ZERO_BUBBLE) == warnings_of("compile.use=stages.compiled") == []
    (warning,) = warnings_of(ZERO_BUBBLE, "compile.use=stages.compiled")
    assert "'stages.compiled' computes weight gradients together with input gradients" in warning
    assert (
        "which [schedule] schedules in the bubble, has nothing to compute; use another component in [compile]"
        in warning
    )
    (warning,) = warnings_of("compile.use=stages.compiled", "stages.recompute='selective'")
    assert "torch chooses what compiled blocks recompute" in warning
    assert warnings_of("compile.use=stages.compiled", "stages.recompute='blocks'") == []


def test_check_warns_of_a_schedule_whose_policies_compiled_blocks_do_not_follow() -> None:
    """The memory `auto` counts on is not freed, as with the stages' own setting."""
    auto = ("schedule.use=pipeline.schedules.auto", "schedule.trials=0", "schedule.stages_per_rank=1")
    again = "{ again = 0.1, kept = 0.6 }"
    chosen = [f"schedule.recompute={{ {policy} = {again} }}" for policy in ("selective", "blocks")]
    warnings = [warnings_of(*auto, values, "compile.use=stages.compiled") for values in chosen]
    about = [[text for text in texts if "torch chooses what compiled blocks recompute" in text] for texts in warnings]
    assert [len(texts) for texts in about] == [1, 0]
    assert "leave recompute.selective out, or remove [compile]" in about[0][0]
    assert warnings_of(*auto, chosen[0]) == []
