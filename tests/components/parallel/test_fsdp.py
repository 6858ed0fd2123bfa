"""Sharded parameters, and the times when ranks have them whole."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drawloom.components.adapters.full_tuning import FullTuning
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.overlap.shard_copies import CopiedShards
from drawloom.components.parallel import shard_unit
from drawloom.components.parallel.fsdp import ShardedModule
from drawloom.components.parallel.shard_unit import start_sum
from drawloom.components.pipeline.runtime.stage_runner import StageRunner
from drawloom.components.ports.model import TokenContext
from drawloom.components.ports.slices import is_dtensor
from drawloom.components.stages.materialized import MaterializedStages
from support import pipelines
from support.adapted import lora
from support.joined import mesh_along
from support.mutations import put
from support.processes import run_ranks
from support.qwen3 import cpu_kernels
from support.steps import pass_on_gradients, prepare_weights

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 25,
    "num_hidden_layers": 3,
    "vocab_size": 21,
}


def _stages(
    mesh: RankMesh,
    device: ComputeDevice,
    reshard: bool | None,
    sync: bool = False,
    adapters: Sequence[Any] = (),
    features: Sequence[Any] = (),
    **precision: Any,
) -> MaterializedStages:
    stages = MaterializedStages(
        model=Qwen3Dense(kernels=cpu_kernels(), **SIZES),
        loss=pipelines.TemperedLoss(),
        schedule=pipelines.schedule("one_f_one_b"),
        mesh=mesh,
        device=device,
        precision=DtypePolicy(**precision),
        job=pipelines.Job(),
        reshard_after_forward=reshard,
        sync_each_microbatch=sync,
        adapters=list(adapters),
        features=list(features),
    )
    stages.open()
    return stages


def _inspect_shards() -> list[dict[str, Any]]:
    """Return a rank's contents, and whether a layer's parameters are slices after a forward, by setting."""
    with mesh_along("data_shard") as (mesh, device):
        records = []
        mixed = {"compute": "bfloat16", "uncast": ["*norm.weight"]}
        cases: list[tuple[bool | None, dict[str, Any]]] = [(None, {}), (False, {}), (True, mixed)]
        for reshard, precision in cases:
            stages = _stages(mesh, device, reshard, **precision)
            module = stages.local[0].module
            tokens = torch.arange(6).view(1, 6)
            prepare_weights(stages)
            with torch.no_grad():
                module(tokens, TokenContext(tokens, torch.zeros_like(tokens)))
            layer = module.get_submodule("model.layers.1")
            freed = is_dtensor(layer.get_parameter("self_attn.q_proj.weight"))
            prepare_weights(stages)
            named = dict(stages.local[0].named_masters_or_parameters())
            records.append(
                {
                    "freed": freed,
                    "sizes": {name: tuple(part.shape) for name, part in named.items()},
                    "slices": stages.state_slices(),
                    "dtypes": {str(part.dtype) for part in named.values()},
                    "bytes": stages.device_bytes(),
                }
            )
        return records


def test_each_rank_keeps_its_slices_and_frees_gathered_weights() -> None:
    """Slices tile every parameter; a layer is freed after its forward unless the setting says no."""
    ranks = run_ranks(_inspect_shards, 2)
    alone = run_ranks(_inspect_shards, 1)[0][0]["sizes"]
    for number, freed in enumerate((True, False, True)):
        mine = [rank[number] for rank in ranks]
        assert [record["freed"] for record in mine] == [freed, freed]
        whole = {name for name, tensor_slice in mine[0]["slices"].items() if tensor_slice is None}
        norms = {name for name in alone if name.endswith("norm.weight")}
        assert whole == {"loss.log"} | (norms if number == 2 else set())
        for name in alone.keys() - whole:
            rows = [record["sizes"][name][0] for record in mine]
            assert sum(rows) == alone[name][0] and rows[0] - rows[1] in (0, 1), name
            assert [record["slices"][name].offsets[0] for record in mine] == [0, rows[0]], name
        assert all(record["dtypes"] == {"torch.float32"} for record in mine)
    whole_bytes = 4 * sum(torch.Size(size).numel() for size in alone.values())
    assert ranks[0][0]["bytes"]["parameters"] + ranks[1][0]["bytes"]["parameters"] < 1.1 * whole_bytes


def _gradients_between() -> dict[bool, list[list[int]]]:
    """Return the elements of whole and sliced gradients, by setting and microbatch."""
    with mesh_along("data_shard") as (mesh, device):
        sums: dict[bool, list[list[int]]] = {}
        for sync in (False, True):
            stages = _stages(mesh, device, False, sync)
            [stage] = stages.local
            shards: Any = stage.shards
            assert shards.reduces_per_microbatch is sync
            tokens = torch.arange(6).view(1, 6)
            prepare_weights(stages)
            sums[sync] = []
            for microbatch in range(3):
                if sync or microbatch == 2:
                    shards.reduce_in_next_backward(is_last_in_step=microbatch == 2)
                context = TokenContext(tokens, torch.zeros_like(tokens))
                stage.module(tokens, context, lambda hidden, head: head.logits(hidden)).square().sum().backward()
                shards.stop_reducing_in_backward()
                parameters = [part for unit in shards.units for part in unit.parameters]
                whole = [_numel(part.unsharded.grad) for part in parameters]
                sliced = [_numel(part.master.grad) for part in parameters]
                sums[sync].append([sum(whole), sum(sliced)])
        return sums


def _numel(grad: Any) -> int:
    return 0 if grad is None else int(grad.numel())


def test_gradients_of_earlier_microbatches_are_kept_in_slices_where_the_setting_says_so() -> None:
    """Without the setting ranks keep whole gradients until the last microbatch, with it none at any time."""
    both = run_ranks(_gradients_between, 2)
    every = sum(sums[True][0][1] for sums in both)
    for sums in both:
        own = sums[True][0][1]
        assert sums == {False: [[every, 0], [every, 0], [0, own]], True: [[0, own]] * 3}


def _find_gradients_sent_before_blocks() -> list[list[int]]:
    """Return the shapes of gradients on their way when the last block's backward pass begins."""
    before: list[list[int]] = []
    with mesh_along("data_shard") as (mesh, device):
        [stage] = (stages := _stages(mesh, device, True)).local
        shards: Any = stage.shards
        sent: list[list[int]] = []

        def look(gradients: Any, shapes: Any, *rest: Any) -> Any:
            sent.extend(map(list, shapes))
            return start_sum(gradients, shapes, *rest)

        put(shard_unit, "start_sum", look)
        last = stage.module.get_submodule("model.layers.2")
        last.register_forward_hook(lambda _, __, hidden: hidden.register_hook(lambda _: before.extend(sent)) and None)
        tokens = torch.arange(6).view(1, 6)
        prepare_weights(stages)
        shards.reduce_in_next_backward(is_last_in_step=True)
        context = TokenContext(tokens, torch.zeros_like(tokens))
        stage.module(tokens, context, lambda hidden, head: head.logits(hidden)).square().sum().backward()
        shards.stop_reducing_in_backward()
        return before


def test_the_gradient_of_a_head_is_reduced_while_blocks_compute_theirs() -> None:
    """It is ready first, and would wait for the embedding's if both were one unit."""
    assert run_ranks(_find_gradients_sent_before_blocks, 2) == [[[21, 16]]] * 2


def _check_reduction_in_weight_pass() -> list[tuple[int, bool]]:
    """Return, for all reductions in W, the number of other whole gradients, and whether a sent tensor is 0."""
    reductions: list[tuple[int, bool]] = []
    with mesh_along("data_shard") as (mesh, device):
        stages = _stages(mesh, device, True)
        [stage] = stages.local
        shards: Any = stage.shards
        runner = StageRunner(stage, stages.loss, split=True)

        def look(sent: Any, *rest: Any) -> Any:
            left = [part.unsharded.grad for unit in shards.units for part in unit.parameters]
            reductions.append(
                (sum(gradient is not None for gradient in left), any(not gradient.any() for gradient in sent))
            )
            return start_sum(sent, *rest)

        put(shard_unit, "start_sum", look)
        prepare_weights(stages)
        [batch] = pipelines.batches(1)
        tokens, context = stages.loss.inputs(batch)
        runner.forward(0, tokens, context, batch)
        runner.backward_input(0, None)
        runner.reduce_in_next_backward(is_last_in_step=True)
        runner.backward_weight(0)
        return reductions


def test_gradients_are_reduced_while_a_pass_for_the_weights_computes_others() -> None:
    """Head, three blocks and the rest are reduced one by one, before other whole gradients exist, and none is zero."""
    for reductions in run_ranks(_check_reduction_in_weight_pass, 2):
        assert reductions == [(0, False)] * 5


def test_a_whole_stage_is_gathered_in_the_order_of_use() -> None:
    """The first block waits for the embedding and itself; the head, which is large, is used last."""
    started: list[str] = []

    def unit(name: str) -> Any:
        return SimpleNamespace(start_gather=lambda: started.append(name))

    blocks = [[unit("block 0"), unit("experts 0")], [unit("block 1")]]
    ShardedModule(nn.Module(), unit("embedding"), [unit("head")], blocks, gathers_per_block=False).start_unshard()
    assert started == ["embedding", "block 0", "experts 0", "block 1", "head"]


def _logits_after_a_change(reshard: bool, copied: bool) -> list[torch.Tensor]:
    """Return doubled weights' logits: without a gather before the change, and with an unused one."""
    all_logits = []
    with mesh_along("data_shard") as (mesh, device):
        for gathered in (False, True):
            features = [CopiedShards(mesh=mesh, precision=DtypePolicy())] if copied else []
            [stage] = (stages := _stages(mesh, device, reshard, features=features)).local
            shards: Any = stage.shards
            tokens = torch.arange(6).view(1, 6)
            context = TokenContext(tokens, torch.zeros_like(tokens))
            prepare_weights(stages)
            with torch.no_grad():
                if gathered:
                    shards.start_unshard()
                for _, parameter in stages.named_parameters():
                    parameter.mul_(2)
                prepare_weights(stages)
                shards.start_unshard()
                all_logits.append(stage.module(tokens, context, lambda hidden, head: head.logits(hidden)))
        return all_logits


@pytest.mark.parametrize(("reshard", "copied"), [(False, False), (True, False), (True, True)])
def test_unused_gathered_weights_are_dropped(reshard: bool, copied: bool) -> None:
    """If an evaluation leaves out a gathered layer, the next step computes with the new weights."""
    for without, with_one in run_ranks(_logits_after_a_change, 2, reshard, copied):
        assert without.equal(with_one)


def _logits_beside_a_change() -> torch.Tensor:
    """Return logits of a pass that rank 1 begins when rank 0 has changed its weights."""
    with mesh_along("data_shard") as (mesh, device):
        features = [CopiedShards(mesh=mesh, precision=DtypePolicy())]
        [stage] = (stages := _stages(mesh, device, True, features=features)).local
        tokens = torch.arange(6).view(1, 6)
        context = TokenContext(tokens, torch.zeros_like(tokens))
        prepare_weights(stages, only_if_changed=True)
        with torch.no_grad():
            for rank in range(2):
                if mesh.shard_group.rank == rank:
                    logits: torch.Tensor = stage.module(tokens, context, lambda hidden, head: head.logits(hidden))
                    for _, parameter in stages.named_parameters():
                        parameter.mul_(2)
                mesh.shard_group.gather_json(None)
        return logits


def test_a_rank_may_change_its_weights_after_its_own_pass() -> None:
    """Other ranks, which are slower, still copy the weights from before, as when averages are in use for a while."""
    first, second = run_ranks(_logits_beside_a_change, 2)
    assert first.equal(second)


def _logits_after_an_update(copied: bool) -> list[torch.Tensor]:
    """Return the logits of an evaluation before and after an update that leaves version numbers."""
    with mesh_along("data_shard") as (mesh, device):
        features = [CopiedShards(mesh=mesh, precision=DtypePolicy())] if copied else []
        [stage] = (stages := _stages(mesh, device, True, features=features)).local
        tokens = torch.arange(6).view(1, 6)
        all_logits = []
        for _ in range(2):
            prepare_weights(stages, only_if_changed=True)
            context = TokenContext(tokens, torch.zeros_like(tokens))
            logits = stage.module(tokens, context, lambda hidden, head: head.logits(hidden))
            all_logits.append(logits.detach())
            logits.sum().backward()
            pass_on_gradients(stages)
            for _, parameter in stages.named_parameters():
                parameter.data.mul_(2)
        return all_logits


def test_an_evaluation_computes_with_updated_weights() -> None:
    """Weights after a fused update, which sets no version number, are gathered and copied again."""
    for gathered, copied in zip(
        *(run_ranks(_logits_after_an_update, 2, copied) for copied in (False, True)), strict=True
    ):
        assert all(first.equal(second) for first, second in zip(gathered, copied, strict=True))
        assert not gathered[0].equal(gathered[1])


def _dtypes_beside_adapters() -> dict[str, tuple[torch.dtype, bool]]:
    """Return a rank's dtypes in mixed precision, and whether parameters are trained."""
    with mesh_along("data_shard") as (mesh, device):
        adapters = [lora("q_proj"), FullTuning(targets=["up_proj", "layers.0.input_layernorm"])]
        mixed: dict[str, Any] = {"compute": "bfloat16", "uncast": ["*norm.weight"]}
        [stage] = _stages(mesh, device, True, adapters=adapters, **mixed).local
        return {name: (part.dtype, part.requires_grad) for name, part in stage.named_masters_or_parameters()}


def test_frozen_weights_are_kept_in_the_compute_dtype() -> None:
    """Slices and whole weights alike: no optimizer needs more precision; weights that are not cast keep their dtype."""
    [alone], sharded = (run_ranks(_dtypes_beside_adapters, ranks) for ranks in (1, 2))
    assert sharded == [alone, alone]
    for name, (dtype, trained) in alone.items():
        wide = trained or name.endswith("norm.weight") or name.startswith("loss.")
        assert dtype == (torch.float32 if wide else torch.bfloat16), name
    assert {trained for _, trained in alone.values()} == {False, True}
