"""Adapters in PEFT's format, as PEFT itself loads them."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.adapters.full_tuning import FullTuning
from drawloom.components.export.adapter import AdapterExport
from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.model.dots1 import Dots1
from drawloom.components.model.gemma4 import Gemma4
from drawloom.components.model.gpt_oss import GptOss
from drawloom.components.model.kimi_linear import KimiLinear
from drawloom.components.model.lfm2 import Lfm2
from drawloom.components.model.minimax_m2 import MiniMaxM2
from drawloom.components.model.nemotron_h import NemotronH
from drawloom.components.model.olmo_hybrid import OlmoHybrid
from drawloom.components.model.phi3 import Phi3
from drawloom.components.model.qwen3_5 import Qwen35
from drawloom.components.model.qwen3_next import Qwen3Next
from drawloom.components.ports.run import FinalTask
from drawloom.components.weights.adapter_folder import AdapterFolder
from drawloom.graph import UserError
from drawloom.graph.types.port_match import find_mismatches
from support.adapted import OneStage, adapt, lora
from support.families import small
from support.qwen3 import SPARSE_SIZES, dense, logits_of, one_document, sparse


def full(*targets: str) -> FullTuning:
    """Full tuning."""
    return FullTuning(targets=list(targets))


def open_exporter(folder: Path, world: Any, model: Any, *adapters: Any) -> AdapterExport:
    """Return an exporter of a model with adapters."""
    stages: Any = OneStage(adapt(model, *adapters), adapters)
    mesh: Any = SimpleNamespace(world=world)
    run: Any = SimpleNamespace(folder=folder)
    exporter = AdapterExport(model=model, stages=stages, folder=run, mesh=mesh, base_model="base")
    exporter.check_before_open()
    return exporter


def export(folder: Path, world: Any, model: Any, *adapters: Any) -> AdapterExport:
    """Write the base, the merged export and the adapter; gives the exporter."""
    exporter = open_exporter(folder, world, model, *adapters)
    exporter.run_after_training(3)
    write_hugging_face_folder(folder / "export", model, exporter.stages)
    write_hugging_face_folder(folder / "base", model, OneStage(adapt(model)))
    return exporter


def theirs(folder: Path, adapter: Path | None = None) -> Any:
    """Return the model of a folder in transformers, with an adapter if given."""
    from peft import PeftModel  # takes seconds
    from transformers import AutoModelForCausalLM

    kinds: Any = AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers' own deprecations
        model = kinds.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
        if adapter is not None:
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            # PEFT uses patterns of parameters, and says that it does not.
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
            model = PeftModel.from_pretrained(model, adapter).eval()
    return model


def read_back(model: Any, adapters: Sequence[Any], folder: Path, base: Path) -> torch.nn.Module:
    """Return a base model with adapters from an adapter's folder, after other initial values."""
    module = adapt(model, *adapters)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.7)
    adapter = AdapterFolder.read(folder)
    adapter.check(model, adapters, base)
    adapter.fill([module], model, adapters, base, torch.device("cpu"), {})
    return module


def partly_sparse_model() -> Any:
    """Return a model whose first layer has no experts."""
    return sparse(mlp_only_layers=[0], intermediate_size=40)


def shared_experts_model() -> Any:
    """Return a model with a layer without experts, and with shared experts, visited by all tokens."""
    return small(Dots1, **SPARSE_SIZES, first_k_dense_replace=1)


HYBRID: dict[str, Any] = {
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
SPARSE_KEYS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def delta_nets_model() -> Any:
    """A model with gated delta nets, whose files join projections."""
    return small(Qwen35, **HYBRID)


def gpt_oss() -> Any:
    """A model whose experts have other dimensions, and alternating outputs, in files."""
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 12, "router_aux_loss_coef": 0.0}
    return small(GptOss, **sizes)


def gemma4() -> Any:
    """A model with experts beside the feed-forward network, in a module missing in transformers."""
    types = ["sliding_attention", "full_attention"]
    return small(Gemma4, **SPARSE_KEYS, layer_types=types, sliding_window=4, global_head_dim=8)


def kimi_linear() -> Any:
    """A model whose modules in transformers have other names than in files, and some another module around them."""
    linear = {"linear_num_heads": 2, "linear_head_dim": 8, "layer_types": HYBRID["layer_types"]}
    latent = {"kv_lora_rank": 10, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    return small(KimiLinear, **SPARSE_KEYS, **linear, **latent)


def minimax_m2() -> Any:
    """A model whose router's bias is a parameter in the module around the router."""
    return small(MiniMaxM2, num_experts=5, num_experts_per_tok=2)


def nemotron_h() -> Any:
    """A model with Mamba-2 and experts, and with another name for the embedding."""
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8}
    return small(NemotronH, **SPARSE_KEYS, **mamba, num_hidden_layers=4, moe_shared_expert_intermediate_size=12)


CASES: dict[str, Any] = {
    "linear": lambda: (dense(), lora("q_proj", "v_proj")),
    "linear, embedding and head": lambda: (dense(), lora("*_proj", "embed_tokens", "lm_head", rslora=True)),
    "tied embedding": lambda: (dense(tie_word_embeddings=True), lora("embed_tokens", "q_proj")),
    "tied head": lambda: (dense(tie_word_embeddings=True), lora("lm_head", "q_proj")),
    "DoRA with the head": lambda: (dense(), lora("*_proj", "lm_head", dora=True)),
    "some layers, two ranks": lambda: (dense(), lora("q_proj", dropout=0.1), lora("0.*.k_proj", rank=2, alpha=1.0)),
    "full tuning beside": lambda: (dense(), lora("q_proj"), full("norm", "lm_head", "layers.1.mlp", "q_norm")),
    "full tuning of a tied table": lambda: (dense(tie_word_embeddings=True), lora("q_proj"), full("embed_tokens")),
    "experts": lambda: (sparse(), lora("experts", "q_proj", rslora=True)),
    "one parameter of experts": lambda: (sparse(), lora("experts.gate_up_proj")),
    "experts with a rank of their own": lambda: (sparse(), lora("experts.down_proj"), lora("q_proj", rank=2)),
    "layers beside experts": lambda: (partly_sparse_model(), lora("down_proj", "q_proj")),
    "all beside experts and these": lambda: (
        partly_sparse_model(),
        lora("self_attn.*", "0.mlp.*", rank=2),
        lora("experts"),
    ),
    "interleaved experts": lambda: (gpt_oss(), lora("experts", "q_proj")),
    "interleaved experts tuned in full": lambda: (gpt_oss(), lora("q_proj"), full("experts")),
    "shared experts": lambda: (shared_experts_model(), lora("shared_experts.up_proj", "layers.0.mlp.*", rslora=True)),
    "joined projections": lambda: (delta_nets_model(), lora("in_proj_qkv", "in_proj_z", "out_proj", "q_proj")),
    "joined heads": lambda: (
        small(Qwen3Next, **HYBRID, **SPARSE_KEYS),
        lora("in_proj_q", "in_proj_a", rank=2, alpha=1.0),
        lora("in_proj_z", "in_proj_b"),
    ),
    "joined projections with DoRA": lambda: (small(Phi3, hidden_size=32), lora("qkv_proj", "down_proj", dora=True)),
    "parts of joined projections": lambda: (small(Phi3, hidden_size=32), lora("k_proj", "layers.1.mlp.up_proj")),
    "a router with a bias": lambda: (shared_experts_model(), lora("q_proj"), full("mlp.gate")),
    "experts tuned in full": lambda: (sparse(), lora("q_proj"), full("experts", "mlp.gate")),
    "experts beside a network": lambda: (gemma4(), lora("*_proj", "experts", "embed_tokens"), full("router")),
    "other names than in files": lambda: (
        kimi_linear(),
        lora("*_proj", "lm_head"),
        full("*norm", "mlp.gate"),
    ),
    "a tuned mixer with joined convolutions": lambda: (kimi_linear(), lora("experts"), full("layers.0.self_attn")),
    "a tuned mixer with joined projections": lambda: (delta_nets_model(), lora("q_proj"), full("linear_attn")),
    "a renamed router": lambda: (minimax_m2(), lora("*_proj", "experts")),
    "Mamba": lambda: (nemotron_h(), lora("*[qkvo]_proj", "in_proj*", "embed_tokens", "experts"), full("mixer.gate")),
    "renamed layers with DoRA": lambda: (
        small(Lfm2, layer_types=["conv", "full_attention"]),
        lora("*_proj*", dora=True),
        full("conv.taps", "*norm"),
    ),
    "other norms than in files": lambda: (small(OlmoHybrid, **HYBRID), lora("*_proj*", "lm_head"), full("*norm")),
}


@pytest.mark.parametrize("case", CASES)
def test_peft_and_the_merged_export_have_our_logits(case: str, tmp_path: Path, one_rank: Any) -> None:
    """The trained model, PEFT over the base, and transformers with the export agree; the base does not."""
    model, *adapters = CASES[case]()
    export(tmp_path, one_rank.world, model, *adapters)
    tokens = torch.arange(14).view(2, 7) % model.vocab_size
    with torch.no_grad():
        ours: Tensor = logits_of(adapt(model, *adapters), tokens, one_document(2, 7))
        assert float((theirs(tmp_path / "base")(tokens).logits - ours).abs().max()) > 0.1
        merged = theirs(tmp_path / "export")(tokens).logits
        torch.testing.assert_close(merged, ours, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(
            theirs(tmp_path / "base", tmp_path / "adapter")(tokens).logits, merged, rtol=1e-4, atol=2e-5
        )
        again = read_back(model, adapters, tmp_path / "adapter", tmp_path / "base")
        torch.testing.assert_close(logits_of(again, tokens, one_document(2, 7)), ours, rtol=1e-5, atol=1e-5)


OF_PEFT: dict[str, Any] = {
    "two ranks, rslora": (
        lambda: (dense(), lora("q_proj", alpha=4.0, rslora=True), lora("v_proj", rank=2, alpha=4.0, rslora=True)),
        {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 4, "use_rslora": True}
        | {"rank_pattern": {"v_proj": 2}},
    ),
    "DoRA with whole modules": (
        lambda: (dense(), lora("k_proj", dora=True), full("*norm")),
        {"target_modules": ["k_proj"], "r": 4, "lora_alpha": 8, "use_dora": True, "modules_to_save": ["norm"]},
    ),
    "embedding and head": (
        lambda: (dense(), lora("embed_tokens", "lm_head")),
        {"target_modules": ["embed_tokens", "lm_head"], "r": 4, "lora_alpha": 8},
    ),
    "joined projections": (
        lambda: (small(Phi3, hidden_size=32), lora("qkv_proj", "down_proj")),
        {"target_modules": ["qkv_proj", "down_proj"], "r": 4, "lora_alpha": 8},
    ),
    "experts": (
        lambda: (sparse(), lora("experts")),
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
        | {"r": 4, "lora_alpha": 8},
    ),
    "experts beside a network": (
        lambda: (gemma4(), lora("experts", "o_proj"), full("router")),
        {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
        | {"r": 4, "lora_alpha": 8, "modules_to_save": ["router"]},
    ),
    "other names than in files": (
        lambda: (kimi_linear(), lora("in_proj_q", "f_a_proj"), full("self_attn.norm", "mlp.gate")),
        {"target_modules": ["layers.0.self_attn.q_proj", "forget_gate.f_a_proj"], "r": 4, "lora_alpha": 8}
        | {"modules_to_save": ["o_norm", "mlp.gate"]},
    ),
    "Mamba": (
        lambda: (nemotron_h(), lora("in_proj*", "embed_tokens"), full("layers.0.norm", "model.norm")),
        {"target_modules": ["in_proj", "embeddings"], "r": 4, "lora_alpha": 8}
        | {"modules_to_save": ["layers.0.norm", "norm_f"]},
    ),
}


@pytest.mark.parametrize("case", OF_PEFT)
def test_adapters_of_peft_have_its_logits(case: str, tmp_path: Path) -> None:
    """An adapter that PEFT made and saved gives our model PEFT's logits."""
    from peft import LoraConfig, get_peft_model

    make, settings = OF_PEFT[case]
    model, *adapters = make()
    write_hugging_face_folder(tmp_path / "base", model, OneStage(adapt(model)))
    tokens = torch.arange(14).view(2, 7) % model.vocab_size
    base = theirs(tmp_path / "base")
    plain = base(tokens).logits.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT: deprecations, and that it saves the embedding, too
        peft = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
        with torch.no_grad():
            for parameter in peft.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        peft.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        ours = logits_of(
            read_back(model, adapters, tmp_path / "adapter", tmp_path / "base"), tokens, one_document(2, 7)
        )
        torch.testing.assert_close(ours, peft(tokens).logits, rtol=1e-4, atol=2e-5)
    assert float((ours - plain).abs().max()) > 0.05


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"peft_type": "IA3"}, "has peft_type = 'IA3', and only LORA is supported"),
        ({"peft_type": "LORA", "r": 4}, "has no numbers above 0 as r and lora_alpha"),
        ({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": "pissa"}, "changes the base's weights"),
        ([], "has no JSON object"),
    ],
)
def test_adapters_of_other_kinds_are_refused(config: Any, text: str, tmp_path: Path) -> None:
    """The message names the file and the key."""
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(UserError, match=text):
        AdapterFolder.read(tmp_path)


def test_a_folder_is_of_one_step(tmp_path: Path, one_rank: Any) -> None:
    """It is finished for the step of its weights, and replaced for a later one."""
    exporter = export(tmp_path, one_rank.world, dense(), lora("q_proj"))
    assert not find_mismatches(AdapterExport, FinalTask)
    assert exporter.has_result_of_step(3) and not exporter.has_result_of_step(6)
    exporter.run_after_training(6)
    assert exporter.has_result_of_step(6)
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "trainer_state.json",
    }


def test_names_are_short_where_all_modules_of_a_name_are_adapted(tmp_path: Path, one_rank: Any) -> None:
    """Other tools read the ends of names; if only some layers are adapted, the names are whole."""
    export(tmp_path, one_rank.world, dense(), lora("q_proj", "layers.1.*.v_proj"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text("utf-8"))
    assert config["target_modules"] == ["model.layers.1.self_attn.v_proj", "q_proj"]
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8.0, "base")


@pytest.mark.parametrize(
    ("adapters", "text"),
    [
        ([lambda: full("norm")], "an adapter for PEFT needs LoRA"),
        ([lambda: lora("q_proj"), lambda: lora("k_proj", dora=True)], "PEFT has DoRA for all layers or for none"),
        ([lambda: lora("layers.0.mlp.up_proj", dora=True)], "PEFT has no DoRA for model.layers.0.mlp.up_proj"),
    ],
)
def test_adapters_that_peft_lacks_are_refused(adapters: Any, text: str, tmp_path: Path, one_rank: Any) -> None:
    """They are refused when the run begins, not after its last step."""
    with pytest.raises(UserError, match=text):
        open_exporter(tmp_path, one_rank.world, partly_sparse_model(), *(make() for make in adapters))


@pytest.mark.parametrize(
    ("model", "adapters", "text"),
    [
        (
            Phi3,
            [lora("q_proj", dora=True)],
            "as one layer, and DoRA adapts only a part of it; adapt .*k_proj",
        ),
        (
            Qwen35,
            [lora("q_proj"), full("in_proj_v")],
            "PEFT tunes whole modules of transformers, and .*in_proj_qkv.weight is not tuned as a whole",
        ),
        (minimax_m2, [lora("q_proj"), full("mlp.gate")], "and .*mlp.experts.gate_up_proj is not tuned as a whole"),
        (nemotron_h, [lora("*_proj")], r"no LoRA for out_proj .* such as \['down_proj', "),
    ],
)
def test_modules_that_peft_does_not_adapt_are_refused(
    model: Any, adapters: Any, text: str, tmp_path: Path, one_rank: Any
) -> None:
    """A message names the module in transformers: parts of joined or tuned modules, and projections of Mamba."""
    sizes = {Qwen35: HYBRID, Phi3: {"hidden_size": 32}}
    built = small(model, **sizes[model]) if model in sizes else model()
    with pytest.raises(UserError, match=text):
        open_exporter(tmp_path, one_rank.world, built, *adapters)
