"""Multi-token prediction against its formula, with a layer from transformers, and published folders' names."""

import json
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drawloom import Recipe, RecipeError
from drawloom.components.distributed.planned import PlannedGroup
from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.loss.multi_token import MultiToken
from drawloom.components.model.deepseek_v3 import DeepseekV3
from drawloom.components.model.qwen3_5_moe import Qwen35Moe
from drawloom.components.model.qwen3_next import Qwen3Next
from drawloom.components.parallel.split_experts import split_experts
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.distributed import PerDimension
from drawloom.components.stages.initial_values import allocate_and_fill_parameters
from drawloom.components.storage.tensor_source import TensorSpec
from drawloom.components.weights.load import compute_group_output_specs, persistent_tensors
from support.adapted import OneStage
from support.checkpoints import SingleRankMesh
from support.families import gradients, small
from support.qwen3 import SPARSE_SIZES, cpu_kernels, dense, one_document, pack_documents, twin, whole

LENGTHS = [[12], [7, 5]]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def compute_by_formula(reference: Any, layers: Any, blocks: Any, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """Return one document's summed cross entropies by depth, for tokens (tokens,), from equations 21 to 24."""
    embedded = reference.model.embed_tokens(tokens[None])
    hidden = reference.model(tokens[None]).last_hidden_state
    sums = [F.cross_entropy(reference.lm_head(hidden)[0], targets, reduction="sum")]
    for depth, (layer, block) in enumerate(zip(layers, blocks, strict=True), 1):
        both = [norm(embedded[:, depth:], layer.enorm.weight), norm(hidden[:, :-1], layer.hnorm.weight)]
        joined = torch.cat(both, -1) @ layer.eh_proj.weight.T
        angles = reference.model.rotary_emb(joined, torch.arange(joined.shape[1])[None])
        count = joined.shape[1]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        hidden = block(joined, attention_mask=mask, position_embeddings=angles)
        logits = reference.lm_head(norm(hidden, layer.norm.weight))
        sums.append(F.cross_entropy(logits[0], targets[depth:], reduction="sum"))
    return sums


def test_losses_and_gradients_equal_the_formula() -> None:
    """Further tokens in packed documents have the formula's losses and gradients for documents alone."""
    torch.manual_seed(0)
    model = dense(tie_word_embeddings=False)
    module = whole(model)
    loss = MultiToken(model=model, mesh=SingleRankMesh(), depth=2, coefficient=0.6)
    layers: Any = loss.module
    layers.to_empty(device="cpu")
    for tensor in layers.parameters():
        nn.init.normal_(tensor, 1.0 if tensor.ndim == 1 else 0.0, 0.2)
    reference = twin(model, persistent_tensors(module))
    blocks = nn.ModuleList(type(reference.model.layers[1])(reference.config, 1) for _ in range(2))
    for own, block in zip(layers, blocks, strict=True):
        prefix = "model.layers.1."
        state = persistent_tensors(own.layer)  # Qwen3 has transformers' names
        block.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in state.items()})
    tokens, targets = torch.randint(29, (2, 2, 12))
    shared = pack_documents(LENGTHS)
    weights = torch.ones(2, 12)
    batch = TokenBatch(
        tokens=tokens, targets=targets, positions=shared.positions, document_ids=shared.document_ids, weights=weights
    )
    inputs, context = loss.inputs(batch)
    total, weight, sums = module(inputs, context, lambda hidden, head: loss.loss(hidden, head, batch))
    documents = [
        compute_by_formula(reference, layers, blocks, *parts)
        for row, answers, lengths in zip(tokens, targets, LENGTHS, strict=True)
        for parts in zip(row.split(lengths), answers.split(lengths), strict=True)
    ]
    first, *further = (torch.stack(by_depth).sum() for by_depth in zip(*documents, strict=True))
    wanted = first + 0.6 * torch.stack(further).sum() / 2
    torch.testing.assert_close(total, wanted, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        sums["further_cross_entropy"], torch.stack(further).sum().detach() / 2, atol=1e-4, rtol=1e-5
    )
    assert weight == 24
    ours, theirs = dict(module.named_parameters()), dict(reference.named_parameters())
    for number, (own, block) in enumerate(zip(layers, blocks, strict=True)):
        ours |= {f"{number}.{name}": parameter for name, parameter in own.named_parameters()}
        outer = [f"{name}.weight" for name in ("enorm", "hnorm", "norm", "eh_proj")]
        theirs |= {f"{number}.{name}": own.get_parameter(name) for name in outer}
        theirs |= {f"{number}.layer.model.layers.1.{name}": part for name, part in block.named_parameters()}
    assert ours.keys() == theirs.keys()
    grads, expected = gradients(total, {name: ours[name] for name in theirs}), gradients(wanted, theirs)
    for name, grad, other in zip(theirs, grads, expected, strict=True):
        size = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(grad / size, other / size, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("mesh.tensor=2",), "predicts further tokens on whole rows and products"),
        (("mesh.context=2",), "predicts further tokens on whole rows and products"),
        (
            ("mesh.pipeline=2", "schedule.use=pipeline.schedules.circular", "executor.use=pipeline.circular.executor"),
            "the circular pipeline passes only hidden states",
        ),
        (("model.use=model.gemma4", "model.hidden_size_per_layer_input=8"), "which can't run alone"),
        (("loss.layers=FOLDER",), "folders of the type qwen3 have no layers for further tokens"),
        (
            (
                *("model.use=model.glm4_moe", "model.num_hidden_layers=4", "model.hidden_size=8"),
                *("model.num_attention_heads=2", "model.num_experts=4", "model.num_experts_per_tok=2"),
                *("model.moe_intermediate_size=8", "loss.depth=2", "loss.layers=FOLDER"),
            ),
            "missing model.layers.4.enorm.weight",
        ),
    ],
)
def test_check_refuses_what_extra_layers_can_not_do(words: tuple[str, ...], text: str, tmp_path: Path) -> None:
    """Split rows or products, circular pipelines, linked layers, and folders without layers are problems."""
    save_file({"model.norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    given = [word.replace("FOLDER", str(tmp_path)) for word in words]
    with pytest.raises(RecipeError, match=text):
        Recipe.load("first_run", "loss.use=loss.multi_token", *given).check()


def test_operations_equal_the_count_of_torch() -> None:
    """FLOPs of the model with its extra layers equal torch's count, where plain attention sees all pairs."""
    model = dense(tie_word_embeddings=False)
    loss = MultiToken(model=model, mesh=SingleRankMesh(), depth=2)
    module = whole(model)
    layers: Any = loss.module
    layers.to_empty(device="cpu")
    tokens = torch.randint(29, (2, 11))
    shared = one_document(2, 11)
    batch = TokenBatch(tokens, tokens, shared.positions, shared.document_ids, torch.ones(2, 11))
    inputs, context = loss.inputs(batch)
    counter: Any = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        module(inputs, context, lambda hidden, head: loss.loss(hidden, head, batch))[0].backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())
    flops = loss.count_forward_flops(model)
    assert flops.count_training_flops(22, {None: 2 * 11 * 11}) == counter.get_total_flops()


LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "head_dim": 4},
    **{"v_head_dim": 8, "first_k_dense_replace": 1},
}
DEEPSEEK = {
    "model.layers.61.embed_tokens.weight": [129280, 7168],
    "model.layers.61.enorm.weight": [7168],
    "model.layers.61.hnorm.weight": [7168],
    "model.layers.61.eh_proj.weight": [7168, 14336],
    "model.layers.61.shared_head.norm.weight": [7168],
    "model.layers.61.shared_head.head.weight": [129280, 7168],
    "model.layers.61.input_layernorm.weight": [7168],
    "model.layers.61.post_attention_layernorm.weight": [7168],
    "model.layers.61.self_attn.q_a_proj.weight": [1536, 7168],
    "model.layers.61.self_attn.q_a_layernorm.weight": [1536],
    "model.layers.61.self_attn.q_b_proj.weight": [24576, 1536],
    "model.layers.61.self_attn.kv_a_proj_with_mqa.weight": [576, 7168],
    "model.layers.61.self_attn.kv_a_layernorm.weight": [512],
    "model.layers.61.self_attn.kv_b_proj.weight": [32768, 512],
    "model.layers.61.self_attn.o_proj.weight": [7168, 16384],
    "model.layers.61.mlp.gate.weight": [256, 7168],
    "model.layers.61.mlp.gate.e_score_correction_bias": [256],
    "model.layers.61.mlp.shared_experts.gate_proj.weight": [2048, 7168],
    "model.layers.61.mlp.shared_experts.up_proj.weight": [2048, 7168],
    "model.layers.61.mlp.shared_experts.down_proj.weight": [7168, 2048],
    **{
        f"model.layers.61.mlp.experts.{n}.{part}_proj.weight": [2048, 7168]
        for n in range(256)
        for part in ("gate", "up")
    },
    **{f"model.layers.61.mlp.experts.{n}.down_proj.weight": [7168, 2048] for n in range(256)},
}
"""Names and shapes of DeepSeek-V3's layer for a further token, in its published index."""


def test_tensors_are_those_of_the_published_deepseek_v3() -> None:
    """Names and shapes equal the published index, for a model of its width with fewer layers."""
    sizes: dict[str, Any] = {
        **{"num_hidden_layers": 4, "hidden_size": 7168, "num_attention_heads": 128, "head_dim": 64},
        **{"vocab_size": 129_280, "intermediate_size": 18_432, "moe_intermediate_size": 2048, "num_experts": 256},
        **{"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3},
    }
    model = DeepseekV3(kernels=cpu_kernels(), **sizes)
    loss = MultiToken(model=model, mesh=SingleRankMesh())
    mapper = loss.extend_export(model.hugging_face_mapper(), {})
    tensors = persistent_tensors(model.build_on_meta())
    tensors |= {f"loss.{name}": tensor for name, tensor in persistent_tensors(cast(nn.Module, loss.module)).items()}
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    found = {
        name.replace(".4.", ".61.", 1): [*spec.shape]
        for group in mapper.groups
        for name, spec in compute_group_output_specs(group, specs).items()
        if name.startswith("model.layers.4.")
    }
    assert found == DEEPSEEK


def write_by_hand(kind: Any, folder: Path) -> set[str]:
    """Write a small folder with an extra layer under published names, and return the extra layer's names."""
    torch.manual_seed(0)
    options = LATENT if kind is DeepseekV3 else {"layer_types": ["linear_attention", "full_attention"]}
    if kind is not DeepseekV3:
        options |= {"shared_expert_intermediate_size": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
        options |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    model = small(kind, **SPARSE_SIZES | {"num_experts": 4, "vocab_size": 260} | options)
    write_hugging_face_folder(folder, model, OneStage(whole(model)))
    tensors = load_file(folder / "model.safetensors")
    layer = {name: torch.randn_like(x) for name, x in tensors.items() if name.startswith("model.layers.1.")}
    if kind is DeepseekV3:
        new = {name.replace(".1.", ".2.", 1): tensor for name, tensor in layer.items()}
        new |= {f"model.layers.2.{name}.weight": torch.randn(24) for name in ("enorm", "hnorm", "shared_head.norm")}
        new["model.layers.2.eh_proj.weight"] = torch.randn(24, 48)
        new["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        new["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"]
    else:
        new = {name.replace("model.layers.1.", "mtp.layers.0."): tensor for name, tensor in layer.items()}
        outer = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        new |= {"mtp.fc.weight": torch.randn(24, 48), **{f"mtp.{name}.weight": torch.randn(24) for name in outer}}
    save_file(tensors | {name: tensor.clone() for name, tensor in new.items()}, folder / "model.safetensors")
    return {*new}


@attrs.frozen
class ExpertMesh(SingleRankMesh):
    """One rank's mesh, with partitioned experts."""

    rank: int = 0

    @property
    def indices(self) -> PerDimension:
        return attrs.evolve(PerDimension.of_first_rank(), expert=self.rank)


@pytest.mark.parametrize("is_read", [False, True])
def test_expert_ranks_begin_with_slices_of_the_same_experts(is_read: bool, tmp_path: Path) -> None:
    """Drawn or read from a folder, two ranks' experts together equal one process's."""
    layers = tmp_path / "base" if is_read else None
    write_by_hand(DeepseekV3, tmp_path / "base")
    model = small(DeepseekV3, **SPARSE_SIZES | {"num_experts": 4, "vocab_size": 260} | LATENT)
    filled = []
    for ranks, mesh in ((1, ExpertMesh()), *((2, ExpertMesh(rank=rank)) for rank in (0, 1))):
        loss = MultiToken(model=model, mesh=mesh, layers=layers)
        loss.check_before_open()
        module: Any = loss.module
        split_experts(module, PlannedGroup(tuple(range(ranks)), mesh.rank))
        allocate_and_fill_parameters("loss", module, torch.device("cpu"), seed=3)
        filled.append(persistent_tensors(module))
    whole_tensors, *parts = filled
    split = {name for name, tensor in whole_tensors.items() if tensor.shape != parts[0][name].shape}
    assert split and all(".experts." in name for name in split)
    for name, tensor in whole_tensors.items():
        joined = torch.cat([part[name] for part in parts]) if name in split else parts[1][name]
        assert torch.equal(joined, tensor), name


@pytest.mark.parametrize("kind", [DeepseekV3, Qwen3Next, Qwen35Moe])
def test_layers_of_a_folder_are_trained_and_written_back(kind: Any, tmp_path: Path) -> None:
    """An untrained export has the folder's tensors; a trained one new layers, and DeepSeek's copies of the head."""
    base = tmp_path / "base"
    further = write_by_hand(kind, base)
    words = ["device.kind=cpu", "loss.use=loss.multi_token", "precision.parameter=float32"]
    recipe = Recipe.load("first_run", *words).with_values(
        {"model": {"use": "model.auto", "path": str(base)}, "run": {"name": "small", "folder": str(tmp_path / "run")}}
    )
    assert any("these begin with random weights" in problem.text for problem in recipe.check())
    recipe = recipe.with_values({"loss": {"layers": str(base)}})
    assert not recipe.check()
    before = load_file(base / "model.safetensors")
    with recipe.open(["stages", "export"]) as objects:
        export, target = objects["export"], tmp_path / "run/export"
        export.run_after_training(1)
        same = load_file(target / "model.safetensors")
        assert same.keys() == before.keys()
        for name, tensor in same.items():  # a norm is 1 + weight in memory
            torch.testing.assert_close(tensor, before[name], atol=1e-6, rtol=0, msg=name)
        loss: Any = objects["stages"].local[0].module.get_submodule("loss")
        norm, is_centred = loss.get_parameter("0.hnorm.weight"), kind is not DeepseekV3
        name = "mtp.pre_fc_norm_hidden.weight" if is_centred else "model.layers.2.hnorm.weight"
        torch.testing.assert_close(norm, before[name] + is_centred)
        with torch.no_grad():
            for parameter in objects["stages"].local[0].module.parameters():
                parameter.mul_(1.5)
        export.run_after_training(2)
    trained = load_file(target / "model.safetensors")
    assert {name for name in further if torch.equal(trained[name], before[name])} <= {
        "model.layers.2.mlp.gate.e_score_correction_bias"
    }
    if kind is DeepseekV3:
        assert torch.equal(trained["model.layers.2.shared_head.head.weight"], trained["lm_head.weight"])
    config = json.loads((target / "config.json").read_text())
    assert config["mtp_num_hidden_layers" if kind is Qwen35Moe else "num_nextn_predict_layers"] == 1
