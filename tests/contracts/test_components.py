"""Every shipped component is put to the contracts of its ports, inside a recipe that uses it."""

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from itertools import count, product
from pathlib import Path
from types import FunctionType
from typing import Any, get_type_hints

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as HuggingFace
from tokenizers import decoders, models, pre_tokenizers, trainers

import drawloom.components.contracts as contracts
from contracts import framework
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.proving.prover import has_contract, iterate_ports
from drawloom.graph.problems import Problem
from drawloom.graph.project import Project, Recipe
from drawloom.graph.testing.ports import check_port, load_contract
from drawloom.graph.types.port_match import implements
from support.chat import say, tokenizer_folder
from support.completion_server import get_shared_server
from support.qwen3 import cpu_kernels, dense, whole
from support.stores import store_of, write_dataset, write_megatron, write_table

CATALOGUE = Project.from_package("drawloom").registry

TINY: dict[str, Any] = {
    "vars": {"length": 16},
    "model": {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 32,
    },
    "batch": {"global_size": 4, "micro_size": 2},
    "validation": {"rows_used": 4},
    "trainer": {"steps": 10},
}
"""What makes the first recipe small."""

LORA: dict[str, Any] = {
    "lora": {"use": "adapters.lora", "targets": ["q_proj"], "rank": 2, "alpha": 4.0},
    "stages": {"adapters": ["@lora"]},
}

LETTERS = "the quick brown fox jumps over the lazy dog\n" * 20


def tokenizer_file(folder: Path) -> Mapping[str, Any]:
    """Write a `tokenizer.json` of bytes."""
    tokenizer = HuggingFace(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([LETTERS], trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet))
    tokenizer.save(str(folder / "tokenizer.json"))
    return {
        "tokenizer": {
            "use": "data.hugging_face_tokenizer",
            "path": str(folder / "tokenizer.json"),
            "end_token": "<end>",
        }
    }


def of_family(use: str, **settings: Any) -> Mapping[str, Any]:
    """Return a small model of a family."""
    return {"model": {**TINY["model"], "use": use, "vocab_size": 257, **settings}}


EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def with_experts(use: str, **changes: Any) -> Mapping[str, Any]:
    """Return a small model with experts."""
    return {"model": {**TINY["model"], "use": use, **EXPERTS, **changes}}


def with_few_experts(use: str) -> Mapping[str, Any]:
    """Return a small model whose layers all have experts."""
    return {"model": {**TINY["model"], "use": use, "num_experts": 3, "num_experts_per_tok": 2}}


def with_parametrization(name: str, **base: int) -> Mapping[str, Any]:
    """Return a small model with a parametrization."""
    scaled = {"use": f"model.parametrization.{name}", **base}
    return {"model": {**TINY["model"], "use": "model.granite", "vocab_size": 257, "parametrization": scaled}}


def with_delta_nets(use: str, **changes: Any) -> Mapping[str, Any]:
    """Return a small model with gated delta nets."""
    widths = {"linear_key_head_dim": 4, "linear_value_head_dim": 4}
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    return {"model": {**TINY["model"], "use": use, **widths, **heads, **changes}}


def with_latent(use: str, **changes: Any) -> Mapping[str, Any]:
    """Return a small model with experts and latent attention."""
    model: dict[str, Any] = dict(with_experts(use)["model"])
    sizes = {"num_key_value_heads": model["num_attention_heads"], "q_lora_rank": 6, "kv_lora_rank": 5}
    return {"model": {**model, **sizes, **changes}}


def dispatching(use: str) -> Mapping[str, Any]:
    """Return a small model with experts, and its dispatcher."""
    return {**with_experts("model.qwen3.moe"), "dispatcher": {"use": use}, "stages": {"dispatcher": "@dispatcher"}}


def config_file(folder: Path) -> Path:
    """Return the config.json of a small model."""
    model = Qwen3Dense(kernels=cpu_kernels(), **TINY["model"] | {"vocab_size": 257})
    (folder / "config.json").write_text(json.dumps(model.hugging_face_config()))
    return folder


def jsonl_file(folder: Path) -> Mapping[str, Any]:
    """Documents, one a line."""
    lines = [f'{{"text": "document {number}: {LETTERS[:40].strip()}"}}\n' for number in range(40)]
    (folder / "documents.jsonl").write_text("".join(lines), "utf-8")
    return {"corpus": {"use": "data.jsonl", "paths": [str(folder / "documents.jsonl")]}}


def conversations(folder: Path) -> Mapping[str, Any]:
    """Conversations, and a tokenizer with a chat template."""
    lines = [json.dumps({"messages": say(f"question {number}?", LETTERS[:40])}) for number in range(40)]
    (folder / "chat.jsonl").write_text("\n".join(lines), "utf-8")
    return {
        "tokenizer": {"use": "data.hugging_face_tokenizer", "path": str(tokenizer_folder(folder / "tokenizer"))},
        "tokens": {
            "use": "data.conversations",
            "paths": [str(folder / "chat.jsonl")],
            "validation_fraction": 0.2,
        },
    }


def preferences(folder: Path) -> Mapping[str, Any]:
    """Return pairs of answers, and the loss comparing them."""
    lines = [{"prompt": f"{n}?", "chosen": LETTERS[: 5 + n % 3], "rejected": LETTERS[:2]} for n in range(40)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return {
        **LORA,
        "tokenizer": {"use": "data.hugging_face_tokenizer", "path": str(tokenizer_folder(folder / "tokenizer"))},
        "tokens": {"use": "data.preferences", "paths": [str(folder / "pairs.jsonl")], "validation_fraction": 0.2},
        "packing": {"use": "data.packing.pairs", "length": 32},
        "loss": {"use": "loss.dpo"},
    }


def preferences_by(loss: str) -> Callable[[Path], Mapping[str, Any]]:
    """Pairs of answers, and another loss of the family."""
    return lambda folder: {**preferences(folder), "loss": {"use": loss}}


def feedback(folder: Path) -> Mapping[str, Any]:
    """Judged answers, and the loss for them."""
    lines = [{"prompt": f"{n}?", "completion": LETTERS[: 5 + n % 3], "label": n % 3 > 0} for n in range(40)]
    (folder / "judged.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    tokens = {"use": "data.feedback", "paths": [str(folder / "judged.jsonl")], "validation_fraction": 0.2}
    return {**preferences(folder), "tokens": tokens, "loss": {"use": "loss.kto"}}


def classification(folder: Path) -> Mapping[str, Any]:
    """Labelled texts, and the loss for them."""
    lines = [{"text": LETTERS[: 5 + n % 3], "label": ("no", "yes")[n % 2]} for n in range(40)]
    (folder / "labelled.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    paths, labels = [str(folder / "labelled.jsonl")], ["no", "yes"]
    return {
        **conversations(folder),
        "tokens": {"use": "data.labelled_texts", "paths": paths, "labels": labels, "validation_fraction": 0.2},
        "loss": {"use": "loss.classification", "labels": labels},
    }


def distillation(folder: Path) -> Mapping[str, Any]:
    """A teacher's predictions for no rows, and the loss that compares with them."""
    (folder / "teacher.json").write_text('{"rows": {}, "length": 1, "top_k": 1}')
    loss = {"use": "loss.distill", "reference": "data"}
    return {"teacher": {"use": "data.teacher_logps", "path": str(folder)}, "loss": loss}


def frozen(folder: Path) -> Mapping[str, Any]:
    """Return a teacher with the weights of a model like the recipe's."""
    sizes = {key: value for key, value in TINY["model"].items() if key != "use"}
    torch.manual_seed(0)  # the same weights in each folder
    module = whole(dense(**sizes, vocab_size=257, tie_word_embeddings=True))
    save_file(dict(module.named_parameters()), folder / "model.safetensors")
    teacher = {"use": "stages.frozen", "model": "@model", "weights": str(folder)}
    return {"teacher": teacher, "loss": {"use": "loss.distill"}}


def store(folder: Path) -> Mapping[str, Any]:
    """Return a token store."""
    store_of(folder / "store", [[f"document {number}: {LETTERS}" for number in range(40)]])
    return {"tokens": {"use": "data.tokenized", "path": str(folder / "store"), "validation_fraction": 0.2}}


def table(folder: Path) -> Mapping[str, Any]:
    """Documents in a table."""
    write_table(folder / "documents.parquet", LETTERS, 40)
    paths = [str(folder / "documents.parquet")]
    return {"corpus": {"use": "data.parquet", "paths": paths, "validation_fraction": 0.2}}


def dataset(folder: Path) -> Mapping[str, Any]:
    """Documents in a saved data set."""
    write_dataset(folder / "dataset", LETTERS)
    return {"corpus": {"use": "data.hugging_face_dataset", "path": str(folder / "dataset"), "validation_fraction": 0.2}}


def megatron(folder: Path) -> Mapping[str, Any]:
    """Return documents tokenized by Megatron-LM."""
    write_megatron(folder / "data", [[*LETTERS[:60].encode(), number, 256] for number in range(40)])
    return {"tokens": {"use": "data.megatron", "path": str(folder / "data"), "vocab_size": 257, "eos_id": 256}}


def examples(folder: Path) -> Mapping[str, Any]:
    """Return examples, and their collator."""
    lines = [json.dumps({"input_ids": [number, 1, 2, number % 7] * (1 + number % 3)}) for number in range(40)]
    (folder / "examples.jsonl").write_text("\n".join(lines), "utf-8")
    paths = [str(folder / "examples.jsonl")]
    return {
        "examples": {"use": "data.json_examples", "paths": paths, "validation_fraction": 0.2},
        "collator": {"use": "data.pad_collator"},
        "packing": {"use": "data.collated", "max_length": 16, "multiple": 8},
    }


def mixture(folder: Path) -> Mapping[str, Any]:
    """Return two sources with shares of their own."""
    held = store(folder)["tokens"], megatron(folder)["tokens"]
    return {
        "tokens": {
            "use": "data.mixture",
            "sources": dict(zip(("store", "other"), held, strict=True)),
            "weights": {"store": 1.0, "other": 3.0},
        }
    }


def reinforcement(folder: Path) -> Mapping[str, Any]:
    """Return phases and components for reinforcement learning, with every reward."""
    phases = [
        "rollout",
        "advantages",
        "record_rollouts",
        "policy_gradient",
        "sync_gradients",
        "optimizer",
        "evaluate",
        "report",
        "checkpoint",
    ]
    schema: Mapping[str, Any] = {"type": "object"}
    rewards: dict[str, dict[str, Any]] = {
        "code": {"key": "answer"},
        "exact_match": {},
        "json_schema": {"json_schema": schema},
        "length": {"max_tokens": 4, "buffer": 2},
        "math_equal": {},
        "regex": {"pattern": "[0-9]"},
        "environment": {},
    }
    return {
        "examples": {"use": "data.sort_digits", "digits": 3, "examples_drawn": 200},
        "collator": {"use": "data.prompt_collator"},
        "packing": {"use": "data.collated", "max_length": 8},
        "rewards": {name: {"use": f"rewards.{name}", **settings} for name, settings in rewards.items()},
        "rollouts": {"use": "rollouts.stages", "max_tokens": 4},
        "rollout": {"use": "phases.rollout", "rewards": ["@rewards.*"], "group_size": 2},
        "advantages": {"use": "phases.advantages"},
        "record_rollouts": {"use": "phases.record_rollouts"},
        "loss": {"use": "loss.grpo"},
        "policy_gradient": {"use": "phases.policy_gradient"},
        "evaluate": {"use": "phases.evaluate_rewards"},
        "metrics": {"rollouts": {"use": "metrics.rollouts"}},
        "checkpoint": {"best": "validation_reward"},
        "trainer": {"phases": [f"@{name}" for name in (*phases, "checkpoint")]},
    }


def turns(folder: Path) -> Mapping[str, Any]:
    """Return reinforcement learning over several turns with a tool."""
    nodes = reinforcement(folder)
    named = {name: {**nodes[name], "rollouts": "@rollouts"} for name in ("rollout", "evaluate")}
    return {
        **nodes,
        **named,
        "examples": {"use": "data.sums", "digits": 1, "examples_drawn": 200},
        "packing": {"use": "data.collated", "max_length": 32},
        "calculator": {"use": "environments.calculator"},
        "environment": {"use": "environments.tools", "tools": ["@calculator"]},
        "sampler": nodes["rollouts"],
        "rollouts": {"use": "rollouts.turns", "sampler": "@sampler"},
    }


POLICY = (
    "data.prompt_collator",
    "data.sort_digits",
    "loss.grpo",
    "metrics.rollouts",
    "phases.advantages",
    "phases.evaluate_rewards",
    "phases.policy_gradient",
    "phases.record_rollouts",
    "phases.rollout",
    "rollouts.stages",
    *(f"rewards.{name}" for name in ("code", "exact_match", "json_schema", "length", "math_equal", "regex")),
    "rewards.environment",
)
TURNS = ("data.sums", "environments.calculator", "environments.tools", "rollouts.turns")

LORA = {
    "lora": {"use": "adapters.lora", "targets": ["*_proj"], "rank": 2, "alpha": 4.0},
    "stages": {"adapters": ["@lora"]},
    "precision": {"compute": "bfloat16"},
}
SAMPLES: dict[str, Callable[[Path], Mapping[str, Any]]] = {
    "data.conversations": conversations,
    "data.packing.pairs": preferences,
    "data.preferences": preferences,
    "loss.dpo": preferences,
    "data.template_prompts": lambda folder: {**conversations(folder), "prompts": {"use": "data.template_prompts"}},
    "data.feedback": feedback,
    "data.labelled_texts": classification,
    "loss.classification": classification,
    "data.teacher_logps": distillation,
    "loss.distill": distillation,
    "stages.frozen": frozen,
    "loss.kto": feedback,
    **{loss: preferences_by(loss) for loss in ("loss.cpo", "loss.ipo", "loss.orpo", "loss.reward", "loss.simpo")},
    **dict.fromkeys(POLICY, reinforcement),
    **dict.fromkeys(TURNS, turns),
    "rollouts.server": lambda folder: {
        **reinforcement(folder),
        "rollouts": {"use": "rollouts.server", "max_tokens": 4, "url": get_shared_server().url},
    },
    "data.hugging_face_tokenizer": tokenizer_file,
    "data.hugging_face_dataset": dataset,
    "data.jsonl": jsonl_file,
    "data.megatron": megatron,
    "data.parquet": table,
    "data.collated": examples,
    "data.json_examples": examples,
    "data.pad_collator": examples,
    "data.mixture": mixture,
    "data.order.chunks": lambda folder: {"order": {"use": "data.order.chunks", "chunks": 3}},
    "data.order.sequential": lambda folder: {"order": {"use": "data.order.sequential"}},
    "data.order.sorted_buffers": lambda folder: {"order": {"use": "data.order.sorted_buffers", "buffer": 4, "pack": 2}},
    "data.packing.best_fit": lambda folder: {"packing": {"use": "data.packing.best_fit", "length": 16}},
    "data.packing.first_fit": lambda folder: {"packing": {"use": "data.packing.first_fit", "length": 16}},
    "data.packing.padded": lambda folder: {"packing": {"use": "data.packing.padded", "length": 16}},
    "data.packing.windows": lambda folder: {"packing": {"use": "data.packing.windows", "length": 16}},
    "data.tokenized": store,
    "proving.rows": lambda folder: {"packing": {"use": "proving.rows", "length": 16}},
    "data.record": lambda folder: {"record": {"use": "data.record"}},
    "data.standard_library": lambda folder: {},
    "learning_rate.constant": lambda folder: {"lr": {"use": "learning_rate.constant", "warmup_steps": 2}},
    "learning_rate.cosine": lambda folder: {"lr": {"use": "learning_rate.cosine"}},
    "learning_rate.inverse_sqrt": lambda folder: {"lr": {"use": "learning_rate.inverse_sqrt"}},
    "learning_rate.linear": lambda folder: {"lr": {"use": "learning_rate.linear"}},
    "learning_rate.wsd": lambda folder: {"lr": {"use": "learning_rate.wsd", "decay_percent": 20.0}},
    "loss.dft": lambda folder: {"loss": {"use": "loss.dft"}},
    "loss.multi_token": lambda folder: {"loss": {"use": "loss.multi_token"}},
    "model.auto": lambda folder: {"model": {"use": "model.auto", "path": str(config_file(folder)), "weights": False}},
    "model.transformers": lambda folder: {
        "model": {"use": "model.transformers", "path": str(config_file(folder)), "weights": False}
    },
    "model.llama": lambda folder: {
        "model": {**TINY["model"], "use": "model.llama", "vocab_size": 257, "attention_bias": True}
    },
    "model.mistral": lambda folder: {
        "model": {**TINY["model"], "use": "model.mistral", "vocab_size": 257, "sliding_window": 4}
    },
    "model.qwen2": lambda folder: {"model": {**TINY["model"], "use": "model.qwen2", "vocab_size": 257}},
    "model.gemma3": lambda folder: {
        "model": {
            **TINY["model"],
            "use": "model.gemma3",
            "vocab_size": 257,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }
    },
    "model.gemma4": lambda folder: {
        "model": {**TINY["model"], "use": "model.gemma4", "vocab_size": 257, "global_head_dim": 8}
    },
    "model.granite": lambda folder: {
        "model": {**TINY["model"], "use": "model.granite", "vocab_size": 257, "residual_multiplier": 0.5}
    },
    "model.parametrization.mup": lambda folder: with_parametrization("mup", base_hidden_size=8),
    "model.parametrization.completep": lambda folder: with_parametrization(
        "completep", base_hidden_size=8, base_num_hidden_layers=1
    ),
    "model.olmo2": lambda folder: {"model": {**TINY["model"], "use": "model.olmo2", "vocab_size": 257}},
    "model.olmo3": lambda folder: {
        "model": {**TINY["model"], "use": "model.olmo3", "vocab_size": 257, "sliding_window": 4}
    },
    "model.lfm2": lambda folder: {"model": {**TINY["model"], "use": "model.lfm2", "vocab_size": 257}},
    "model.smollm3": lambda folder: {"model": {**TINY["model"], "use": "model.smollm3", "vocab_size": 257}},
    "model.qwen3.moe": lambda folder: with_experts("model.qwen3.moe"),
    "model.dots1": lambda folder: with_experts("model.dots1"),
    "model.gpt_oss": lambda folder: with_few_experts("model.gpt_oss"),
    "model.minimax_m2": lambda folder: with_few_experts("model.minimax_m2"),
    "model.qwen3_5": lambda folder: with_delta_nets("model.qwen3_5", partial_rotary_factor=0.5),
    "model.pattern": lambda folder: {
        **with_delta_nets("model.pattern", layers="kda, conv"),
        "unset": ["export"],
        "trainer": {"on_finish": []},
    },
    "model.olmo_hybrid": lambda folder: with_delta_nets("model.olmo_hybrid"),
    "model.nemotron_h": lambda folder: with_experts(
        "model.nemotron_h",
        mamba_num_heads=2,
        mamba_head_dim=8,
        n_groups=1,
        ssm_state_size=8,
        moe_shared_expert_intermediate_size=16,
    ),
    "model.kimi_linear": lambda folder: with_latent("model.kimi_linear", linear_num_heads=2, linear_head_dim=8),
    "model.qwen3_5_moe": lambda folder: with_delta_nets("model.qwen3_5_moe", partial_rotary_factor=0.5, **EXPERTS),
    "model.qwen3_next": lambda folder: with_delta_nets("model.qwen3_next", partial_rotary_factor=0.5, **EXPERTS),
    "model.phi3": lambda folder: {"model": {**TINY["model"], "use": "model.phi3", "vocab_size": 257}},
    "model.glm4_moe": lambda folder: with_experts("model.glm4_moe"),
    "model.deepseek_v2": lambda folder: with_latent("model.deepseek_v2"),
    "model.deepseek_v3": lambda folder: with_latent("model.deepseek_v3"),
    "model.deepseek_v32": lambda folder: with_latent(
        "model.deepseek_v32", q_lora_rank=8, index_topk=4, index_n_heads=2, index_head_dim=16
    ),
    "model.glm_moe_dsa": lambda folder: with_latent(
        "model.glm_moe_dsa", q_lora_rank=8, index_topk=4, index_n_heads=2, index_head_dim=16
    ),
    "model.glm4_moe_lite": lambda folder: with_latent("model.glm4_moe_lite"),
    "metrics.expert_load": lambda folder: {
        **with_experts("model.qwen3.moe"),
        "metrics": {"experts": {"use": "metrics.expert_load"}},
    },
    "phases.ema": lambda folder: {
        "ema": {"use": "phases.ema"},
        "edit": {"trainer": {"phases": {"after": {"@optimizer": "@ema"}}}},
    },
    "phases.compare_replicas": lambda folder: {
        "compare": {"use": "phases.compare_replicas", "every": 1},
        "edit": {"trainer": {"phases": {"after": {"@optimizer": "@compare"}}}},
    },
    "phases.budget": lambda folder: {
        "budget": {"use": "phases.budget", "tokens": 10_000_000},
        "edit": {"trainer": {"phases": {"after": {"@optimizer": "@budget"}}}},
    },
    "phases.early_stopping": lambda folder: {
        "early_stopping": {"use": "phases.early_stopping"},
        "edit": {"trainer": {"phases": {"after": {"@evaluate": "@early_stopping"}}}},
    },
    "phases.loss_spikes": lambda folder: {
        "loss_spikes": {"use": "phases.loss_spikes", "go_back": 1},
        "edit": {"trainer": {"phases": {"after": {"@sync_gradients": "@loss_spikes"}}}},
    },
    "experts.replayed_routes": lambda folder: {
        **reinforcement(folder),
        **with_experts("model.qwen3.moe"),
        "metrics": {"replayed_routes": {"use": "experts.replayed_routes"}},
        "edit": {"trainer": {"phases": {"after": {"@advantages": "@metrics.replayed_routes"}}}},
    },
    "phases.shared_prefixes": lambda folder: {
        **reinforcement(folder),
        "kernels": {"attention": "tree"},
        "shared_prefixes": {"use": "phases.shared_prefixes"},
        "edit": {"trainer": {"phases": {"after": {"@advantages": "@shared_prefixes"}}}},
    },
    "phases.router_bias": lambda folder: {
        **with_experts("model.dots1"),
        "router_bias": {"use": "phases.router_bias"},
        "edit": {"trainer": {"phases": {"after": {"@optimizer": "@router_bias"}}}},
    },
    "experts.local": lambda folder: dispatching("experts.local"),
    "experts.symmetric": lambda folder: dispatching("experts.symmetric"),
    "experts.all_to_all": lambda folder: dispatching("experts.all_to_all"),
    "adapters.full_tuning": lambda folder: {
        "adapter": {"use": "adapters.full_tuning", "targets": ["norm"]},
        "stages": {"adapters": ["@adapter"]},
    },
    "adapters.lora": lambda folder: LORA,
    "export.adapter": lambda folder: {
        **LORA,
        "adapter": {"use": "export.adapter"},
        "trainer": {"on_finish": ["@adapter"]},
    },
    "metrics.activation_rms": lambda folder: {"metrics": {"activations": {"use": "metrics.activation_rms"}}},
    "metrics.auroc": lambda folder: {"metrics": {"auroc": {"use": "metrics.auroc"}}},
    "metrics.histograms": lambda folder: {
        "metrics": {"weights": {"use": "metrics.histograms", "targets": ["*"]}},
        "edit": {"trainer": {"phases": {"before": {"@optimizer": "@metrics.weights"}}}},
    },
    "metrics.multilabel": lambda folder: {"metrics": {"labels": {"use": "metrics.multilabel", "labels": 3}}},
    "metrics.classification": lambda folder: {"metrics": {"f1": {"use": "metrics.classification", "classes": 3}}},
    "metrics.bits_per_byte": lambda folder: {"metrics": {"bits": {"use": "metrics.bits_per_byte"}}},
    "metrics.fill_rate": lambda folder: {"metrics": {"fill": {"use": "metrics.fill_rate"}}},
    "metrics.group": lambda folder: {"metrics": {"all": {"use": "metrics.group", "members": ["@metrics.learning"]}}},
    "metrics.layer_norms": lambda folder: {
        "metrics": {"layers": {"use": "metrics.layer_norms"}},
        "edit": {"trainer": {"phases": {"before": {"@optimizer": "@metrics.layers"}}}},
    },
    "metrics.mean": lambda folder: {"metrics": {"mean": {"use": "metrics.mean", "of": "loss"}}},
    "metrics.perplexity": lambda folder: {"metrics": {"perplexity": {"use": "metrics.perplexity"}}},
    "metrics.recovery": lambda folder: {"metrics": {"recovery": {"use": "metrics.recovery"}}},
    "metrics.source_tokens": lambda folder: {"metrics": {"sources": {"use": "metrics.source_tokens"}}},
    "metrics.spread": lambda folder: {"metrics": {"spread": {"use": "metrics.spread", "quantiles": [0.5]}}},
    "optim.adam": lambda folder: {"optimizer": {"use": "optim.adam", "lr": 0.1}},
    "optim.muon": lambda folder: {"optimizer": {"use": "optim.muon", "lr": 0.1}},
    "optim.sgd": lambda folder: {"optimizer": {"use": "optim.sgd", "lr": 0.1}},
    "optim.stochastic_adamw": lambda folder: {
        "optimizer": {"use": "optim.stochastic_adamw", "lr": 0.1},
        "precision": {"parameter": "bfloat16"},
    },
    # With casts, which are what the ports of stages are about.
    "pipeline.circular.executor": lambda folder: {
        "schedule": {"use": "pipeline.schedules.circular"},
        "executor": {"use": "pipeline.circular.executor"},
    },
    "stages.materialized": lambda folder: {"precision": {"compute": "bfloat16", "gradient": "float32"}},
    "stages.grafted": lambda folder: (
        frozen(folder) and {"graft": {"use": "stages.grafted", "folder": str(folder), "new": ["*.mlp.*"]}}
    ),
    "stages.compiled": lambda folder: {"compile": {"use": "stages.compiled"}},
    "pipeline.offloaded_inputs": lambda folder: {
        "offload": {"use": "pipeline.offloaded_inputs"},
        "stages": {"recompute": "blocks"},
    },
    "pipeline.kept_attention": lambda folder: {
        "attention": {"use": "pipeline.kept_attention"},
        "stages": {"recompute": "blocks"},
    },
    "float8.training": lambda folder: {
        "float8": {"use": "float8.training", "exclude": ["*"]},
        "precision": {"compute": "bfloat16"},
    },
    "overlap.tensor_products": lambda folder: {"overlap": {"use": "overlap.tensor_products"}},
    "overlap.shard_copies": lambda folder: {"copies": {"use": "overlap.shard_copies"}, "mesh": {"data_shard": "auto"}},
    "kernels.batch_invariant": lambda folder: {"kernels": {"use": "kernels.batch_invariant"}},
    "frozen_weights.quantized": lambda folder: (
        LORA | {"quantized": {"use": "frozen_weights.quantized", "exclude": ["*"]}}
    ),
    "frozen_weights.streamed": lambda folder: LORA | {"streamed": {"use": "frozen_weights.streamed"}},
    "checkpoint.state_hashes": lambda folder: {"state_hashes": {"use": "checkpoint.state_hashes"}},
    "checkpoint.mirror": lambda folder: {
        "listeners": {"mirror": {"use": "checkpoint.mirror", "url": f"file://{folder}/mirror"}}
    },
    "checkpoint.phase_hashes": lambda folder: {"listeners": {"trace": {"use": "checkpoint.phase_hashes"}}},
    "checkpoint.staging.none": lambda folder: {"staging": {"use": "checkpoint.staging.none"}},
    "checkpoint.staging.overlapped": lambda folder: {"staging": {"use": "checkpoint.staging.overlapped"}},
    "gradients.clip_group_norm": lambda folder: {"clip": {"use": "gradients.clip_group_norm", "max_norm": 1.0}},
    "gradients.clip_value": lambda folder: {"clip": {"use": "gradients.clip_value", "max_value": 1.0}},
    "trackers.tensorboard": lambda folder: {"trackers": {"tensorboard": {"use": "trackers.tensorboard"}}},
    "trackers.csv": lambda folder: {"trackers": {"csv": {"use": "trackers.csv"}}},
    "trackers.aim": lambda folder: {"trackers": {"aim": {"use": "trackers.aim"}}},
    "listeners.profiler": lambda folder: {"listeners": {"profiler": {"use": "listeners.profiler"}}},
    "listeners.replay": lambda folder: {"listeners": {"replay": {"use": "listeners.replay", "every": 1}}},
    "pipeline.captured": lambda folder: {"capture": {"use": "pipeline.captured"}},
    "planning.check": lambda folder: {"listeners": {"plan": {"use": "planning.check"}}},
    "planning.memory": lambda folder: {"stages": {"memory": {"use": "planning.memory"}}},
}
"""How a recipe uses those that the first one does not; a schedule stands alone."""

EXCEPT = {
    ("pipeline.from_csv", "Schedule"): "it is for one number of ranks and microbatches",
    **{
        (
            f"trackers.{name}",
            port,
        ): f"the package {name} is none of the tests'; those of the tracker use it where it is installed"
        for name, port in (
            ("wandb", "Stateful"),
            *product(("wandb", "trackio", "mlflow"), ("Tracker", "DistributionTracker", "PropertyTracker")),
        )
    },
    **{
        ("environments.verifiers", port): "the package is not one of the tests'; its own tests have a stand-in"
        for port in ("Environment", "Examples")
    },
    ("data.prompt_collator", "Collator"): "its rows are prompts, and the contract's examples are token ids",
    ("loss.grpo", "Loss"): "it reads sampled log-probabilities, and the contract has rows of a data set",
    ("loss.kto", "Loss"): "it reads labels and sums over the step, and the contract has rows without them",
    ("loss.distill", "Loss"): "it reads a teacher's predictions, and the contract has rows without them",
    ("loss.classification", "Loss"): "it reads labels, and the contract has rows without them",
    ("loss.reward", "Loss"): "it compares documents of a row, and the contract's rows have one",
    ("phases.policy_gradient", "Phase"): "it trains on the step's batches, and the contract's step has none",
    ("trackers.aim", "Stateful"): "each instance takes Aim a second; its own tests load states",
}
"""What is not put to a contract, and why."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a corpus of small files."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number}: {LETTERS[:88]}", "utf-8")
    return {"use": "data.text_files", "validation_fraction": 0.2, "paths": [str(folder / "*.txt")]}


def recipe_for(use: str, texts: Mapping[str, Any], folder: Path) -> tuple[Recipe, str]:
    """Return a small recipe with a component, and the name of its node."""
    corpus = {} if use == "data.standard_library" else {"corpus": texts}
    home = {"run": {"name": "contract", "folder": str(folder / "run")}}
    recipe = Recipe.load("first_run").with_values({**TINY, **corpus, **home})
    if use in SAMPLES:
        recipe = recipe.with_values(SAMPLES[use](folder))
    names = [name for name, node in recipe.graph.nodes.items() if node.spec.use == use]
    assert names, f"say in SAMPLES how a recipe uses {use!r}"
    return recipe, names[0]


def _types_of(item: object) -> Iterator[Any]:
    """Yield the types of a function's parameters; nothing for another object."""
    return iter(get_type_hints(item).values() if isinstance(item, FunctionType) else ())


WITH_CONTRACT = [port for port in iterate_ports() if has_contract(port)]

INTERNAL = {
    port: [item for name, item in vars(framework).items() if name[0] != "_" and next(_types_of(item), None) is port]
    for port in iterate_ports()
}
"""Properties of ports that plugins do not implement."""


def list_ports_with_contract(use: str) -> list[type]:
    """Return a component's ports with a contract."""
    spec = CATALOGUE.find(use)
    assert not isinstance(spec, Problem), spec
    checked = [*WITH_CONTRACT, *(port for port, properties in INTERNAL.items() if properties)]
    ports_of_component = [port for port in dict.fromkeys(checked) if implements(spec.cls, port)]
    return [port for port in ports_of_component if (use, port.__name__) not in EXCEPT]


@pytest.mark.parametrize(
    "use",
    # Aim starts for a third of a minute.
    [pytest.param(use, marks=[pytest.mark.soak] * (use == "trackers.aim")) for use in CATALOGUE.names()],
)
def test_every_component_keeps_the_contracts_of_its_ports(use: str, texts: Mapping[str, Any], tmp_path: Path) -> None:
    """Every component has the behaviour promised by its ports."""
    numbers = count()

    @contextmanager
    def in_a_recipe() -> Iterator[Any]:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        recipe, name = recipe_for(use, texts, folder)
        with recipe.open(only=name) as objects:
            yield objects[name]

    for port in list_ports_with_contract(use):
        if port in WITH_CONTRACT:
            check_port(use if use.startswith("pipeline.schedules.") else in_a_recipe, port)
        for holds in INTERNAL[port]:
            with ExitStack() as stack:
                holds(*(stack.enter_context(in_a_recipe()) for _ in signature(holds).parameters))


def test_every_port_has_a_contract_or_a_reason() -> None:
    """A plugin's author can put an implementation of any port to a contract, or reads why no plugin implements it."""
    without = {port.__name__ for port in iterate_ports()} - {port.__name__ for port in WITH_CONTRACT}
    assert without == framework.FRAMEWORK_ONLY.keys()
    assert all(len(reason) > 20 for reason in framework.FRAMEWORK_ONLY.values())


def test_every_contract_is_found_by_its_port() -> None:
    """No function of a contract is left over when a port is gone or renamed, and there are many."""
    modules = [
        importlib.import_module(f"{contracts.__name__}.{m.name}") for m in pkgutil.iter_modules(contracts.__path__)
    ]
    written = {
        item
        for module in (*modules, framework)
        for name, item in vars(module).items()
        if isinstance(item, FunctionType) and item.__module__ == module.__name__ and not name.startswith("_")
    }
    known = {item for port in WITH_CONTRACT for item in load_contract(port)}
    assert written == known | {item for properties in INTERNAL.values() for item in properties}
    assert len(WITH_CONTRACT) >= 37 and sum(map(len, map(list_ports_with_contract, CATALOGUE.names()))) >= 85
