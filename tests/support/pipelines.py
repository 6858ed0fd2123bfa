"""A small model over pipeline ranks, and the results of its steps."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.distributed.sum_over_shards import SumOverParameters
from drawloom.components.experts.all_to_all import AllToAllExperts
from drawloom.components.experts.symmetric import SymmetricExperts
from drawloom.components.gradients.clip_group_norm import ClipGroupNorm
from drawloom.components.gradients.synchronize import Synchronize
from drawloom.components.loss.dft import Dft
from drawloom.components.loss.multi_token import MultiToken
from drawloom.components.loss.next_token import NextToken
from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.deepseek_v3 import DeepseekV3
from drawloom.components.model.gemma3 import Gemma3
from drawloom.components.model.gemma4 import Gemma4
from drawloom.components.model.glm4_moe import Glm4Moe
from drawloom.components.model.glm_moe_dsa import GlmMoeDsa
from drawloom.components.model.gpt_oss import GptOss
from drawloom.components.model.granite import Granite
from drawloom.components.model.kimi_linear import KimiLinear
from drawloom.components.model.lfm2 import Lfm2
from drawloom.components.model.minimax_m2 import MiniMaxM2
from drawloom.components.model.nemotron_h import NemotronH
from drawloom.components.model.olmo3 import Olmo3
from drawloom.components.model.olmo_hybrid import OlmoHybrid
from drawloom.components.model.pattern import Pattern
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.components.model.qwen3_5 import Qwen35
from drawloom.components.model.qwen3_next import Qwen3Next
from drawloom.components.model.transformers import Transformers
from drawloom.components.optim.adamw import AdamW
from drawloom.components.optim.muon import Muon
from drawloom.components.optim.parameter_groups import AdamGroup
from drawloom.components.pipeline.captured import CapturedPasses
from drawloom.components.pipeline.circular.executor import CircularExecutor
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.pipeline.schedules.circular import Circular
from drawloom.components.ports.data import IGNORE_INDEX, TokenBatch
from drawloom.components.ports.experts import Dispatcher
from drawloom.components.ports.features import StageFeature
from drawloom.components.ports.model import Head, HiddenStates, TokenContext
from drawloom.components.ports.pipeline import PassFeature, Schedule, sum_losses_and_weights
from drawloom.components.ports.program import Program
from drawloom.components.ports.run import Step
from drawloom.components.ports.stages import Adapter, Recompute
from drawloom.components.stages.materialized import MaterializedStages
from drawloom.graph.registry.registry import Registry
from support.adapted import lora
from support.joined import join_processes
from support.qwen3 import cpu_kernels
from support.steps import evaluate, train

TRAINING = [
    name.rpartition(".")[2]
    for name in Registry.from_package("drawloom.components").names()
    if name.startswith("pipeline.schedules.")
]
"""The names of all schedules."""

VOCABULARY = 21
"""Token ids: neither two ranks nor four share them evenly."""


@attrs.frozen
class Job:
    """A run."""

    name: str = "test"
    seed: int = 3
    folder_path: Any = None


class FreezeFirstLayer(StageFeature):
    """A feature for freezing layer 0."""

    def transform(self, module: Any) -> Any:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith("model.layers.0."))
        return module


class FreezeAllButNorms(StageFeature):
    """A feature for training only the norms of the last layer, which one pipeline rank has."""

    def transform(self, module: Any) -> Any:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith("model.layers.3.") and name.endswith("norm.weight"))
        return module


def schedule(name: str, **settings: Any) -> Any:
    """Build a schedule by the last part of its name."""
    return Registry.from_package("drawloom.components").require(f"pipeline.schedules.{name}").cls(**settings)


@attrs.frozen
class Recomputing:
    """A schedule whose stages recompute by these policies."""

    schedule: Any
    policies: tuple[Recompute, ...] = ()

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        return self.schedule.stage_to_rank(ranks)  # type: ignore[no-any-return]

    def program(self, ranks: int, microbatches: int) -> Program:
        program: Program = self.schedule.program(ranks, microbatches)
        return attrs.evolve(program, recompute=self.policies)


def batches(count: int, shortest: int = 4, step: int = 1) -> list[TokenBatch]:
    """
    Return microbatches of three lengths, with documents, ignored targets, and differing numbers of padded positions.
    """
    microbatches = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        length = shortest + step * (number % 3)
        tokens = torch.randint(0, VOCABULARY, (2, length), generator=generator)
        targets = torch.randint(0, VOCABULARY, (2, length), generator=generator)
        targets[:, 1] = IGNORE_INDEX
        padding = torch.zeros(2, length, dtype=torch.bool)
        padding[1, length - number % 3 :] = True
        targets[padding] = IGNORE_INDEX
        positions = torch.arange(length).expand(2, length).contiguous()
        weights = torch.rand(targets.shape, generator=generator).masked_fill(targets == IGNORE_INDEX, 0)
        documents = torch.zeros_like(tokens)
        if step > 1:  # two documents, of which the second begins inside of a part of a row
            documents[:, 3:] = 1
            positions[:, 3:] -= 3
        microbatches.append(TokenBatch(tokens, targets, positions, documents, weights, padding=padding))
    return microbatches


class Temperature(nn.Module):
    """A trained divisor of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.log)


class TemperedLoss(NextToken):
    """A loss with a parameter of its own, which takes logits chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Temperature()

    def loss(self, hidden: Tensor, head: Head, batch: TokenBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        losses = head.map_logits(self._losses, hidden, batch.targets, max_bytes=500)
        return (losses * batch.weights).sum(), batch.weights.double().sum(), {"squares": losses.detach().square().sum()}

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        tempered = logits / self.module.log.exp()
        return F.cross_entropy(tempered, targets, ignore_index=IGNORE_INDEX, reduction="none")


class StatesLoss(NextToken):
    """A loss of several layers' hidden states, which have to reach the last stage, and their gradients the first."""

    def inputs(self, batch: TokenBatch) -> tuple[Tensor, TokenContext]:
        tokens, shared = super().inputs(batch)
        return tokens, attrs.evolve(shared, hidden_states=HiddenStates((0, 2), documents=2), mean_weights=batch.weights)

    def loss(self, hidden: Any, head: Head, batch: TokenBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        last, states = hidden
        total, weight, _ = super().loss(last, head, batch)
        cubes = torch.stack([state.double().pow(3).sum() * (layer + 1) for layer, state in states.items()]).sum()
        return total + cubes, weight, {"cubes": cubes.detach()}


class MeasuredLoss(NextToken):
    """The loss, after passes of its own over a step's microbatches."""

    def compute_part_of_step_sums(self, hidden: Any, head: Head, batch: TokenBatch) -> Tensor:
        total: Tensor = hidden.double().sum()
        return total[None]

    def with_step_sums(self, batch: TokenBatch, sums: Tensor) -> TokenBatch:
        return batch


LOSSES: dict[str, Callable[[], Any]] = {
    "plain": NextToken,
    "measured": MeasuredLoss,
    "muon": NextToken,
    "symmetric": NextToken,
    "dora": NextToken,
    "norms": NextToken,
    "smoothed": partial(NextToken, z_loss=0.1, label_smoothing=0.2, accuracy=True, top_k=3),
    "dft": Dft,
    "tempered": TemperedLoss,
    "states": StatesLoss,
}

Case = tuple[str | Schedule, int, bool, bool, str]
"""
A schedule or its name, the microbatch count, whether embedding and head are tied, whether the first layer is frozen,
and the name of a loss. "muon", "symmetric", "dora" and "norms" mean the plain loss with another optimizer, dispatcher
or adapters, or with only the last layer's norms trained. "further" is the loss of further tokens. A name in FAMILIES
means the plain loss with another model.
"""


EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "mlp_only_layers": [1],
    "router_aux_loss_coef": 0.5,
    "router_z_loss_coef": 0.1,
    "initializer_range": 0.2,  # or all experts would give next to nothing
}

GROUPED: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "router_aux_loss_coef": 0.5,
    "initializer_range": 0.2,
}

HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "initializer_range": 0.2,
}

FAMILIES: dict[str, tuple[Callable[..., DecoderBuilder], dict[str, Any]]] = {
    "gemma3": (
        Gemma3,
        {
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "sliding_window": 3,
            "query_pre_attn_scalar": 5,
            "attention_bias": True,
        },
    ),
    # other heads in full attention, whose keys are values, numbers after layers, experts, and bounded logits
    "gemma4": (
        Gemma4,
        GROUPED
        | {
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "sliding_window": 3,
            "global_head_dim": 12,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 2.0,
        },
    ),
    # layers that read keys of others, and embeddings by layer
    "gemma4_linked": (
        Gemma4,
        {
            "layer_types": ["full_attention"] * 2,
            "global_head_dim": 12,
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 6,
        },
    ),
    # norms over whole projections and after layers, multipliers, layers without positions
    "olmo3": (Olmo3, {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 3}),
    "granite": (
        Granite,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
            "mlp_bias": True,
        },
    ),
    # gated short convolutions
    "lfm2": (Lfm2, {"layer_types": ["conv", "full_attention"] * 4, "initializer_range": 0.2}),
    # No biases: the gradient of a key's bias is 0 in channels that are not rotated, and Adam divides noise by noise.
    # sinks, and experts with biases
    "gpt_oss": (
        GptOss,
        {
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "sliding_window": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 6,
            "router_aux_loss_coef": 0.5,
            "initializer_range": 0.2,
        },
    ),
    # norms over whole projections, a rotated part of heads, and routers with a bias
    "minimax_m2": (
        MiniMaxM2,
        {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 6, "initializer_range": 0.2},
    ),
    # the gated delta rule, and gated attention
    "qwen3_5": (Qwen35, HYBRID),
    # norms before delta nets and after attention, and strengths up to 2
    "olmo_hybrid": (OlmoHybrid, HYBRID),
    # a model of one's own, with two residual streams
    "pattern": (
        Pattern,
        {key: value for key, value in HYBRID.items() if key != "layer_types"}
        | {"layers": "gdn, attention", "residual": "hyper", "residual_streams": 2},
    ),
    # with experts, of which one has a gate
    "qwen3_next": (
        Qwen3Next,
        HYBRID
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "shared_expert_intermediate_size": 8,
            "router_aux_loss_coef": 0.5,
        },
    ),
    "glm4_moe": (Glm4Moe, GROUPED | {"first_k_dense_replace": 1, "use_qk_norm": True}),
    # latent attention, alone and with DeepSeek-V3's experts
    "deepseek_v3": (
        DeepseekV3,
        GROUPED
        | {
            "num_key_value_heads": 4,
            "head_dim": 6,
            "qk_nope_head_dim": 10,
            "v_head_dim": 7,
            "kv_lora_rank": 9,
            "q_lora_rank": 11,
            "attention_bias": True,
        },
    ),
    # latent attention to tokens that an indexer chooses, also for the next layer
    "glm_moe_dsa": (
        GlmMoeDsa,
        GROUPED
        | {
            "indexer_types": ["full", "shared"] * 4,
            "num_key_value_heads": 4,
            "head_dim": 6,
            "kv_lora_rank": 9,
            "q_lora_rank": 11,
            "index_topk": 2,
            "index_n_heads": 12,
            "index_head_dim": 8,
            "indexer_loss_coef": 0.5,
        },
    ),
    # Mamba-2, and experts with squared ReLU between projections to fewer channels, in layers with one branch
    "nemotron_h": (
        NemotronH,
        {key: value for key, value in GROUPED.items() if key != "router_aux_loss_coef"}
        | {
            "layer_types": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
            "mamba_num_heads": 4,
            "mamba_head_dim": 5,
            "n_groups": 2,
            "ssm_state_size": 6,
            "moe_shared_expert_intermediate_size": 8,
            "moe_latent_size": 10,
        },
    ),
    # the gated delta rule with decays by channel
    "kimi_linear": (
        KimiLinear,
        GROUPED
        | {
            "num_key_value_heads": 4,
            "head_dim": 6,
            "kv_lora_rank": 9,
            "linear_num_heads": 4,
            "linear_head_dim": 6,
            "layer_types": ["linear_attention", "full_attention"] * 4,
        },
    ),
}
"""Families of models by the last part of a case, with their settings."""


def model_of_transformers(kernels: Any, tie_word_embeddings: bool, **config: Any) -> Any:
    """Return a model of transformers with random weights."""
    plain = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with TemporaryDirectory() as folder:
        values = config | plain | {"tie_word_embeddings": tie_word_embeddings}
        (Path(folder) / "config.json").write_text(json.dumps(values))
        model = Transformers(kernels=kernels, path=Path(folder), weights=False)
        model.check_before_open()  # reads the config
    return model


FALLBACKS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "starcoder2": (model_of_transformers, {"model_type": "starcoder2", "use_bias": True}),
    "gemma2": (model_of_transformers, {"model_type": "gemma2", "final_logit_softcapping": 0.5}),
}
"""Models of transformers: norms in float64, and a head that transformers computes."""
"""Models without tensor and context parallelism, by the last part of a case."""

FLOAT64 = {"parameter": "float64"}  # sums stay in float64
MIXED = {"parameter": "float32", "compute": "bfloat16"}
GROUPS = [
    AdamGroup(targets=["*embed_tokens*"], lr_multiplier=0.5),
    AdamGroup(targets=["*.layers.1.*"], betas=(0.8, 0.9), weight_decay=0.2),
]
"""On a pipeline, ranks but the first have no parameter of the first."""


def steps(
    cases: Sequence[Case],
    sizes: Mapping[str, int] = {},
    kind: Literal["cpu", "cuda"] = "cpu",
    dtypes: Mapping[str, Any] = FLOAT64,
    step_count: int = 1,
    layers: int = 8,
    lengths: tuple[int, int] = (4, 1),
    experts: int = 0,
    recompute: Sequence[Recompute] = ("none",),
    settings: Mapping[str, Any] = {},
    evaluated: int | None = None,
    features: Sequence[Callable[..., Any]] = (),
) -> list[dict[str, Any]]:
    """Return the results of each case's steps on this rank of a mesh."""
    common = kind, dtypes, step_count, layers, experts, recompute, settings, evaluated, features
    return steps_on_meshes([(cases, sizes, lengths)], *common)[0]


def steps_on_meshes(
    meshes: Sequence[tuple[Sequence[Case], Mapping[str, int], tuple[int, int]]],
    kind: Literal["cpu", "cuda"] = "cpu",
    dtypes: Mapping[str, Any] = FLOAT64,
    step_count: int = 1,
    layers: int = 8,
    experts: int = 0,
    recompute: Sequence[Recompute] = ("none",),
    settings: Mapping[str, Any] = {},
    evaluated: int | None = None,
    features: Sequence[Callable[..., Any]] = (),
) -> list[list[dict[str, Any]]]:
    """
    Return the results of each case's steps on this rank, in all processes started together, or in this one.

    A mesh has cases, sizes, and row lengths: the shortest, and by how much others are longer. Pipeline ranks take what
    the sizes leave. Each data-parallel rank has its part of the microbatches. `step_count` steps are taken with AdamW,
    and all but the last are followed by an update. The model has `layers` layers; with `experts`, every layer but the
    second has this number of experts. All cases run with each `recompute` policy, with `settings` of the stages, and
    with features of these classes. Of the cases on a mesh the first `evaluated` have a validation loss.
    """
    with join_processes(kind) as (processes, device):
        results = []
        for cases, sizes, lengths in meshes:
            rest = processes.world_size // math.prod(size for name, size in sizes.items() if name != "expert")
            mesh = RankMesh(processes=processes, **{"pipeline": rest, "data_replicate": 1, **sizes})
            mesh.open()
            precision = DtypePolicy(**dtypes)
            common: Any = mesh, device, precision, step_count, layers, lengths, experts
            mesh_results = []
            for policy in recompute:
                for number, case in enumerate(cases):
                    rest_of_case: Any = policy, settings, evaluated is None or number < evaluated, features
                    mesh_results.append(_steps(*case, *common, *rest_of_case))
            results.append(mesh_results)
        return results


def _adapters() -> list[Adapter]:
    """Return factors for every kind of layer, and DoRA where it is possible."""
    return [lora("*_proj", "lm_head", dora=True), lora("embed_tokens")]


def _dispatcher(kind: str, kernels: Any, mesh: RankMesh) -> Dispatcher:
    if kind == "symmetric":
        return SymmetricExperts(kernels=kernels, mesh=mesh, max_tokens=64, capacity=2.0)
    return AllToAllExperts(kernels=kernels, mesh=mesh)


def _steps(
    used: str | Schedule,
    microbatches: int,
    tied: bool,
    frozen: bool,
    kind: str,
    mesh: RankMesh,
    device: Any,
    precision: DtypePolicy,
    step_count: int,
    layers: int,
    lengths: tuple[int, int],
    experts: int,
    recompute: Recompute,
    settings: Mapping[str, Any],
    evaluated: bool,
    features: Sequence[Callable[..., Any]],
) -> dict[str, Any]:
    """
    Return gradients by name, as the optimizer gets them in the last step, and the weights before it; their slices; the
    element count of the optimizer's moments; this rank's loss and sums, its share of the validation loss if it is
    evaluated, and gradient norms of all parameters and by layer.
    """
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
    }
    kernels = cpu_kernels()
    if experts:
        sizes |= EXPERTS | {"num_experts": experts}
    family, more = (FAMILIES | FALLBACKS).get(kind, (Qwen3Moe if experts else Qwen3Dense, {}))
    model = family(kernels=kernels, tie_word_embeddings=tied, **sizes | more)
    freezing = [FreezeAllButNorms()] if kind == "norms" else [FreezeFirstLayer()] if frozen else []
    ports = {"device": device, "mesh": mesh, "precision": precision}
    around = [feature(**{name: ports[name] for name in ports.keys() & feature.__annotations__}) for feature in features]
    stages = MaterializedStages(
        model=model,
        dispatcher=_dispatcher(kind, kernels, mesh),
        loss=MultiToken(model=model, mesh=mesh, depth=2) if kind == "further" else LOSSES.get(kind, NextToken)(),
        schedule=schedule(used) if isinstance(used, str) else used,
        mesh=mesh,
        device=device,
        precision=precision,
        job=Job(),
        adapters=_adapters() if kind == "dora" else [],
        features=[*freezing, *(feature for feature in around if isinstance(feature, StageFeature))],
        bucket_bytes=1000,
        recompute=recompute,
        **settings,
    )
    stages.open()
    executor = (CircularExecutor if isinstance(stages.schedule, Circular) else ProgramExecutor)(
        features=[feature for feature in around if isinstance(feature, PassFeature)],
        stages=stages,
        schedule=stages.schedule,
        objective=stages.loss,
        mesh=mesh,
        device=device,
    )
    executor.open()
    reduce = SumOverParameters(mesh=mesh)
    synchronize = Synchronize(parameters=stages, mesh=mesh, reduce=reduce)
    use: Any = Muon if kind == "muon" else AdamW
    optimizer = use(parameters=stages, mesh=mesh, lr=1e-3, groups=[] if kind == "norms" else GROUPS)
    optimizer.open()
    microbatches_of_all = batches(max(3, microbatches), *lengths)
    among, replica = mesh.sizes.data_replicate * mesh.sizes.data_shard, mesh.indices.data_replicate
    share, first = microbatches // among, replica * mesh.sizes.data_shard + mesh.indices.data_shard
    microbatches_of_rank = microbatches_of_all[first * share : (first + 1) * share]
    for number in range(1, step_count + 1):
        step = Step(number, step_count, train(executor, microbatches_of_rank))
        synchronize.run_phase(step)
        if number < step_count:
            optimizer.run_phase(step)
    total, _ = sum_losses_and_weights(step.state)
    sums = {name: values.double().sum(0) for name, values in step.state["losses"]["sums"].items()}
    held_out = float(sum_losses_and_weights(evaluate(executor, microbatches_of_all[:3]))[0]) if evaluated else 0.0
    for feature in around:
        if isinstance(feature, CapturedPasses):
            feature.close()  # a communicator would wait for its graphs
    clip = partial(ClipGroupNorm, parameters=stages, reduce=reduce, device=device)
    grads = {
        name: None if parameter.grad is None else parameter.grad.cpu() for name, parameter in stages.named_parameters()
    }
    return {
        "grads": grads,
        "weights": {name: part.cpu() for name, part in stages.state_dict().items() if isinstance(part, Tensor)},
        "slices": stages.state_slices(),
        "moments": sum(
            part.numel()
            for state_of_parameter in optimizer.state_dict().values()
            for part in state_of_parameter.values()
            if part.ndim
        ),
        "loss": float(total) / mesh.sizes.tensor,  # which these ranks have alike
        "sums": {key: float(value) for key, value in sums.items()},
        "held_out": held_out / mesh.sizes.tensor / among,  # which these ranks have alike
        "norm": step.state.number("grad_norm"),
        "norms": [
            float(clip(max_norm=1.0, norm_type=p, targets=[targets])._compute_norm_over_ranks())
            for p, targets in ((1.0, "*"), (3.0, "*layers.*"), (math.inf, "*"))
        ],
    }


def assemble(parts: Sequence[Mapping[str, Any]], key: str) -> dict[str, Tensor | None]:
    """
    Return the whole tensors under `key`, of any shapes, from the slices of all ranks; slices of several ranks must be
    equal.
    """
    tensors: dict[str, Tensor | None] = {}
    for part in parts:
        for name, tensor in part[key].items():
            tensor_slice = part["slices"][name]
            if tensor_slice is None or tensor is None:
                first = tensors.setdefault(name, tensor)
                assert (first is None) == (tensor is None), name
                if tensor is not None and first is not None:
                    torch.testing.assert_close(tensor, first, rtol=1e-12, atol=1e-14)
                continue
            target = tensors.setdefault(name, torch.full(tensor_slice.shape, torch.nan, dtype=tensor.dtype))
            assert target is not None
            target[tuple(slice(at, at + size) for at, size in zip(tensor_slice.offsets, tensor.shape, strict=True))] = (
                tensor
            )
    return tensors


def assert_same_steps(ranks: Sequence[Mapping[str, Any]], whole: Mapping[str, Any]) -> None:
    """Assert that losses, norms, gradients and weights of all ranks equal one process's in float64, to 1e-10."""
    assert sum(rank["loss"] for rank in ranks) == pytest.approx(whole["loss"], rel=1e-10)
    held_out = sum(rank["held_out"] for rank in ranks)
    assert held_out in (0, pytest.approx(whole["held_out"], rel=1e-10))
    for rank in ranks:
        assert [rank["norm"], *rank["norms"]] == pytest.approx([whole["norm"], *whole["norms"]], rel=1e-9)
    for key in ("grads", "weights"):
        tensors = assemble(ranks, key)
        assert tensors.keys() == whole[key].keys()
        for name, tensor in tensors.items():
            if tensor is None or whole[key][name] is None:
                assert tensor is None and whole[key][name] is None, name
                continue
            torch.testing.assert_close(tensor, whole[key][name], rtol=1e-10, atol=1e-12, msg=name)
