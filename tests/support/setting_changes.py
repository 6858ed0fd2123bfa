"""Another value of every setting of every component, and how its effect is observed; used by test_settings."""

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.data.bytes import Bytes
from support import observers as parts
from support import observers_of_rollouts as policy
from support import observers_of_runs as runs
from support.qwen3 import SIZES, SPARSE_SIZES

Observer = Callable[[str, Any, Path], Any]


@attrs.frozen
class Change:
    """
    Another value of a setting.

    `given` is set before and after; None there leaves a value of the row out. `refused` says that the other value's
    effect is a message, since it takes several ranks or a GPU.
    """

    value: Any
    given: dict[str, Any] = attrs.field(factory=dict)
    observer: Observer | None = None
    refused: bool = False


@attrs.frozen
class Row:
    """A component's observer, its settings before and after, and each setting's other value."""

    observer: Observer
    base: dict[str, Any]
    changes: dict[str, Any]


INVALID_BYTES = Change("refuse", {"paths": ["latin.txt"], "invalid_bytes": "replace"}, refused=True)
NO_HEAD = Change("exported", refused=True)
STAGES_PER_RANK = Row(parts.program, {}, {"stages_per_rank": 3})
EVERY = {"every": 2}
OTHER_RELOAD = {"path": "/update_weights_from_disk", "body": {"model_path": "{folder}"}}
SPLIT = {"validation_fraction": 0.9}
BETAS = {"lr": 0.02, "betas": [0.5, 0.6], "eps": 0.5, "weight_decay": 0.5}
HOST_STATES: dict[str, Any] = {
    "states": Change("host", {"slot_bytes": 6}, parts.memory_of_optimizer),
    "slot_bytes": Change(4, {"states": "host"}, parts.memory_of_optimizer),
}
NORMS = [{"targets": ["*norm"], "lr_multiplier": 2.0}]
GROUPS: dict[str, Any] = {
    "groups": NORMS,
    "groups.targets": Change([{**NORMS[0], "targets": ["*weight"]}], {"groups": NORMS}),
    "groups.lr_multiplier": NORMS,
    "groups.weight_decay": [{"targets": ["*norm"], "weight_decay": 5.0}],
}
VARIANTS = {"amsgrad": True, "maximize": True}
AGAIN = {"recompute": {"blocks": {"again": 0.2, "kept": 0.1}}}

BETAS_OF_GROUP = {"groups.betas": [{"targets": ["*norm"], "betas": [0.5, 0.6]}]}
NO_SIZES: dict[str, Any] = dict.fromkeys(SPARSE_SIZES)
# With this base and length, pairs of channels are on either side of the bounds and between them.
BOUNDS = {"rope_theta": 10.0, "original_max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, **BOUNDS, "beta_fast": 8.0, "beta_slow": 4.0}
MODEL: dict[str, Any] = {
    "config": Change("other.json", NO_SIZES | {"config": "one.json"}),
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 48,
    "vocab_size": 31,
    "new_tokens": 4,
    "vocabulary_multiple": Change(64, {"vocab_size": None, "tokenizer": Bytes()}),
    "tie_word_embeddings": True,
    "max_position_embeddings": Change(64, observer=parts.config_of),
    "rope_theta": 10.0,
    "rope_scaling": YARN,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10.0},
    "rms_norm_eps": 0.5,
    "initializer_range": 0.5,
}


def config(family: str) -> Change:
    """Return another config.json of a family."""
    return Change(f"other_{family}.json", NO_SIZES | {"config": f"one_{family}.json"})


TYPED_SIZES: dict[str, Any] = SIZES | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LAYER_TYPES: dict[str, Any] = {
    "layer_types": Change(["full_attention"] * 3, {"sliding_window": 3}),
    "sliding_window": 3,
    "attention_bias": True,
}
LLAMA = {"rope_type": "llama3", "factor": 4.0, **BOUNDS, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10.0,
    "original_max_position_embeddings": 4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
SHORT = LONG | {"original_max_position_embeddings": 99}
LENGTHS = [{"length": 2, "until_step": 1}]
RAMP = [{"size": 8, "until_step": 1}]
POLYNOMIAL = [{"to": 1.0, "curve": "polynomial"}]
ROPE = {
    "rope_type": (YARN, {"rope_type": "linear", "factor": 4.0}),
    "rope_theta": (YARN, YARN | {"rope_theta": 100.0}),
    "factor": (YARN, YARN | {"factor": 8.0}),
    "original_max_position_embeddings": (YARN, YARN | {"original_max_position_embeddings": 32}),
    "beta_fast": (YARN, YARN | {"beta_fast": 15.0}),
    "beta_slow": (YARN, YARN | {"beta_slow": 2.0}),
    "truncate": (YARN, YARN | {"truncate": False}),
    "mscale": (YARN | {"mscale_all_dim": 0.5, "mscale": 1.0}, YARN | {"mscale_all_dim": 0.5, "mscale": 0.1}),
    "mscale_all_dim": (YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}, YARN | {"mscale": 0.5, "mscale_all_dim": 0.1}),
    "attention_factor": (YARN, YARN | {"attention_factor": 3.0}),
    "short_factor": (SHORT, SHORT | {"short_factor": [3.0] * 4}),
    "long_factor": (LONG, LONG | {"long_factor": [3.0] * 4}),
    "low_freq_factor": (LLAMA, LLAMA | {"low_freq_factor": 0.2}),
    "high_freq_factor": (LLAMA, LLAMA | {"high_freq_factor": 40.0}),
}


def rope_changes(changes: dict[str, Any], refused: tuple[str, ...] = ()) -> dict[str, Change]:
    """Return changes to keys in both rotary tables, from pairs: a table before and after."""
    return {
        f"{name}.{key}": Change(after, {name: before}, parts.logits_of, refused=key in refused)
        for name in ("rope_scaling", "rope_parameters")
        for key, (before, after) in changes.items()
    }


MODEL |= rope_changes(ROPE)
NTK = {"rope_type": "ntk", "factor": 4.0, "rope_theta": 10.0}
LONG_ONLY: dict[str, Any] = {key: (LONG, after) for key, (_, after) in ROPE.items()} | {
    "rope_type": (LONG, NTK),
    "rope_theta": (LONG, LONG | {"rope_theta": 100.0}),
    "factor": (NTK, NTK | {"factor": 8.0}),
    "original_max_position_embeddings": (LONG, LONG | {"original_max_position_embeddings": 99}),
    "attention_factor": (LONG, LONG | {"attention_factor": 3.0}),
    "short_factor": ROPE["short_factor"],
}
OF_OTHERS = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor")
EXPERTS = {
    "intermediate_size": Change(48, {"mlp_only_layers": [0]}),
    "config": Change("other_moe.json", NO_SIZES | {"config": "one_moe.json"}),
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "norm_topk_prob": False,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "router_aux_loss_coef": 0.5,
    "router_z_loss_coef": 0.5,
}
SHARED_EXPERTS = {
    key: change for key, change in EXPERTS.items() if key not in ("decoder_sparse_step", "mlp_only_layers")
}
SHARED_EXPERTS |= {
    "intermediate_size": Change(48, {"first_k_dense_replace": 1}),
    "config": Change("other_dots1.json", NO_SIZES | {"config": "one_dots1.json"}),
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": Change(3, {"num_experts": 6}),
    "topk_group": Change(2, {"num_experts": 6, "n_group": 3}),
    "sliding_window": Change(3, {"max_window_layers": 1}),
    "max_window_layers": Change(1, {"sliding_window": 3}),
}
DELTA = {
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
HYBRID_SIZES: dict[str, Any] = (
    SIZES | {"layer_types": ["linear_attention", "full_attention"] * 2, "partial_rotary_factor": 1.0} | DELTA
)
HYBRID: dict[str, Any] = MODEL | {
    "layer_types": ["full_attention"] * 3,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
SPARSE_KEYS = ("intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
"""Expert settings in Qwen3-Next that Qwen3.5 lacks."""

LATENT_SIZES = SPARSE_SIZES | {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 10,
    "v_head_dim": 7,
    "kv_lora_rank": 9,
    "q_lora_rank": 11,
}
GROUPED = {
    key: change
    for key, change in SHARED_EXPERTS.items()
    if key not in ("sliding_window", "max_window_layers", "config")
}
LATENT = (
    MODEL
    | GROUPED
    | {
        "num_attention_heads": Change(2, {"num_key_value_heads": None}),
        "num_key_value_heads": Change(2, refused=True),
        "qk_nope_head_dim": 12,
        "v_head_dim": 6,
        "kv_lora_rank": 20,
        "q_lora_rank": 0,
        "rope_interleave": False,
        "attention_bias": True,
    }
)
GEMMA_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MAMBA_SIZES = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 5,
    "n_groups": 2,
    "ssm_state_size": 7,
    "moe_shared_expert_intermediate_size": 10,
}
INDEX_SIZES = {"index_topk": 2, "index_n_heads": 3, "index_head_dim": 8}
INDEXED = {key: change for key, change in LATENT.items() if key != "rope_interleave"} | {
    "q_lora_rank": 6,
    "index_topk": 1,
    "index_n_heads": 2,
    "index_head_dim": 12,
    "indexer_loss_coef": 0.5,
    "indexer_warmup": True,
}
LINEAR_SIZES = {"linear_num_heads": 2, "linear_head_dim": 8}
WARMUP = {
    "start": 0.75,
    "warmup_steps": 3,
    "warmup_tokens": Change(130, {"warmup_steps": None}),
    "warmup_percent": Change(50.0, {"warmup_steps": None}),
}
TRITON = (
    "dequantize",
    "rms_norm",
    "add_rms_norm",
    "swiglu",
    "swiglu_halves",
    "geglu",
    "oss_swiglu_halves",
    "choose_keys",
    "sparse_attention",
    "causal_conv",
    "gated_delta_rule",
    "state_space",
    "connect_streams",
    "rope",
    "qk_norm_rope",
    "linear_cross_entropy",
    "moe_routes",
    "moe_permute",
    "moe_unpermute",
    "moe_peers",
    "grouped_gemm",
    "add_expert_bias",
)

ROWS: dict[str, Row] = {
    "adapters.full_tuning": Row(runs.train_with_adapter, {"targets": ["norm"]}, {"targets": ["layers.0"]}),
    "adapters.lora": Row(
        runs.train_with_adapter,
        {"targets": ["q_proj"], "rank": 2, "alpha": 4.0},
        {"targets": ["k_proj"], "rank": 3, "alpha": 5.0, "rslora": True, "dora": True, "dropout": 0.5},
    ),
    "experts.symmetric": Row(
        parts.rows_of_peers, {"max_tokens": 6, "capacity": 1.0}, {"max_tokens": 5, "capacity": 1.2}
    ),
    "checkpoint.checkpointer": Row(
        runs.checkpoints_of,
        {"every": 1, "keep": 2},
        {
            "every": 3,
            "keep": 4,
            "keep_every": 2,
            "best": "loss",
            "best_is": Change("highest", {"best": "loss"}),
            "failures": Change(5, {"every": None, "keep": None}, runs.count_failed_saves),
        },
    ),
    "checkpoint.mirror": Row(parts.copies_of_mirror, {"url": "one"}, {"url": "two", "every": 200.0, "timeout": 5.0}),
    "checkpoint.staging.blocking": Row(runs.stage_values, {}, {"keep": False}),
    "checkpoint.staging.overlapped": Row(runs.stage_values, {}, {"keep": False}),
    "data.conversations": Row(
        parts.conversations_of,
        {"paths": ["one.chat"], "validation_fraction": 0.0, "template": "one.jinja"},
        {
            "paths": ["*.chat"],
            "template": Change("other.jinja", {"date": date(2024, 7, 26)}),
            "turns": "one_row_per_turn",
            "roles": {"user": 1.0},
            "date": Change(date(2025, 7, 26), {"template": "other.jinja", "date": date(2024, 7, 26)}),
            "validation_fraction": 0.5,
        },
    ),
    "data.collated": Row(parts.pad_examples, {"max_length": 9}, {"max_length": Change(3, refused=True), "multiple": 4}),
    "data.json_examples": Row(
        parts.examples_of, {"paths": ["one.ids"], "validation_fraction": 0.1}, SPLIT | {"paths": ["*.ids"]}
    ),
    "data.pad_collator": Row(parts.pad_examples, {}, {"side": "left", "pad_id": 5}),
    "data.hugging_face_tokenizer": Row(
        parts.tokens_of,
        {"path": "one_tokenizer.json", "end_token": "<a>"},
        {"path": "other_tokenizer.json", "end_token": "<b>", "begin_token": "<b>"},
    ),
    "data.jsonl": Row(parts.documents, {"paths": ["one.jsonl"]}, SPLIT | {"paths": ["*.jsonl"], "field": "other"}),
    "data.hugging_face_dataset": Row(
        parts.documents,
        {"path": "one_dataset", "validation_fraction": 0.1},
        {"path": "other_dataset", "field": "other", "train": "test", "validation": "test"} | SPLIT,
    ),
    "data.loader": Row(
        parts.load_microbatches,
        {"workers": 1},
        {"workers": 2, "prefetch": 3, "timeout": 7.0, "lengths": LENGTHS}
        | {"lengths.length": LENGTHS, "lengths.until_step": LENGTHS}
        | {"lengths.until_tokens": [{"length": 2, "until_tokens": 9}]},
    ),
    "data.mixture": Row(
        parts.weights_of_sources,
        {},
        {
            "weights": {"one": 1.0, "other": 2.0},
            "epochs": {"one": 2.0},
            "temperature": 2.0,
        },
    ),
    "data.order.chunks": Row(parts.rows_in_order, {"chunks": 2}, {"chunks": 3}),
    "data.order.sorted_buffers": Row(parts.rows_in_order, {"buffer": 6, "pack": 2}, {"buffer": 4, "pack": 3}),
    "data.tokenized": Row(
        parts.first_tokens,
        {"path": "one_store", "validation_fraction": 0.0},
        {"path": "other_store", "validation_fraction": 0.5, "validation_path": "other_store"},
    ),
    "data.tokenized_text": Row(parts.find_caches, {}, {"cache": "another"}),
    "data.megatron": Row(
        parts.first_tokens,
        {"path": "one_megatron", "vocab_size": 300, "eos_id": 0},
        {"path": "other_megatron", "vocab_size": 301, "eos_id": 1, "validation_fraction": 0.9},
    ),
    "data.packing.best_fit": Row(parts.pack_documents, {"length": 8}, {"length": 4}),
    "proving.rows": Row(parts.make_proving_rows, {"length": 8}, {"length": 9}),
    "data.packing.concatenated": Row(parts.pack_documents, {"length": 8}, {"length": 4}),
    "data.packing.first_fit": Row(parts.pack_documents, {"length": 8}, {"length": 4}),
    "data.packing.pairs": Row(parts.pack_documents, {"length": 40}, {"length": 14, "share_prompts": True}),
    "data.packing.padded": Row(parts.pack_documents, {"length": 8}, {"length": 4}),
    "data.packing.windows": Row(parts.pack_documents, {"length": 6, "stride": 4}, {"length": 4, "stride": 2}),
    "data.feedback": Row(
        parts.conversations_of,
        {"paths": ["one.judged"], "validation_fraction": 0.0, "template": "one.jinja"},
        {
            "paths": ["*.judged"],
            "template": Change("other.jinja", {"date": date(2024, 7, 26)}),
            "date": Change(date(2025, 7, 26), {"template": "other.jinja", "date": date(2024, 7, 26)}),
            "validation_fraction": 0.5,
        },
    ),
    "data.preferences": Row(
        parts.conversations_of,
        {"paths": ["one.pairs"], "validation_fraction": 0.0, "template": "one.jinja"},
        {
            "paths": ["*.pairs"],
            "template": Change("other.jinja", {"date": date(2024, 7, 26)}),
            "date": Change(date(2025, 7, 26), {"template": "other.jinja", "date": date(2024, 7, 26)}),
            "validation_fraction": 0.5,
        },
    ),
    "data.parquet": Row(
        parts.documents, {"paths": ["one.parquet"]}, SPLIT | {"paths": ["*.parquet"], "field": "other"}
    ),
    "data.standard_library": Row(parts.documents, {}, SPLIT),
    "data.text_files": Row(
        parts.documents,
        {"paths": ["texts/*.txt"]},
        SPLIT | {"paths": ["texts/1*.txt"], "invalid_bytes": INVALID_BYTES},
    ),
    "data.validation": Row(parts.validation_rows, {}, {"rows_used": 3}),
    "distributed.device": Row(
        runs.device_of,
        {"kind": "cpu"},
        {
            "kind": "cuda",
            "threads": 3,
            "backend": Change("nccl", refused=True),
            "tf32": Change(True, refused=True),
        },
    ),
    "distributed.mesh": Row(
        runs.sizes_of_mesh,
        {},
        {"pipeline": 2, "data_shard": 2, "context": 2, "tensor": 2, "expert": Change(2, {"data_shard": 4})}
        | {"data_replicate": Change(2, refused=True)},  # two replicas are not four ranks
    ),
    "distributed.precision": Row(
        runs.stages_of,
        {},
        {
            "parameter": "bfloat16",
            "compute": "bfloat16",
            "gradient": Change("float32", {"compute": "bfloat16", "parameter": "bfloat16"}),
            "reduce": Change("float64", observer=runs.sums_over_replicas),
            "uncast": Change(["*norm.weight"], {"compute": "bfloat16"}),
        },
    ),
    "distributed.processes": Row(
        runs.join_timeouts,
        {},
        {
            "timeout": 7.0,
            "on_failure": Change("continue", {}, runs.join_running),
            "heartbeat_timeout": Change(7.0, {"on_failure": "continue"}, runs.join_running),
        },
    ),
    "export.adapter": Row(runs.export_adapter, {}, {"base_model": "some/model"}),
    "export.hugging_face": Row(runs.export_files, {}, {"max_shard": 5000, "dtype": "bfloat16"}),
    "overlap.tensor_products": Row(runs.shifts_of_two_ranks, {}, {"through": "memory"}),
    "float8.training": Row(
        runs.float8_layers_of,
        {},
        {
            "exclude": ["*.q_proj"],
            "round_weights": "step",
            "gather": Change(True, {}, runs.planned_gather),
            "implementation": "triton",
        },
    ),
    "frozen_weights.quantized": Row(
        runs.formats_of_frozen_weights, {}, {"format": "mxfp4", "exclude": ["*.q_proj.weight"]}
    ),
    "gradients.clip_group_norm": Row(
        parts.clip_gradients, {"max_norm": 1.0}, {"max_norm": 2.0, "norm_type": 1.0, "targets": ["*norm"]}
    ),
    "gradients.clip_norm": Row(parts.clip_gradients, {"max_norm": 1.0}, {"max_norm": 2.0}),
    "gradients.clip_value": Row(parts.clip_gradients, {"max_value": 1.0}, {"max_value": 2.0}),
    "gradients.synchronize": Row(parts.divide_gradients, {}, {"norm": "device"}),
    "kernels.auto": Row(
        parts.choose_kernels,
        {},
        dict.fromkeys(TRITON, "triton")
        | {"attention": "flex"}
        | {"filter_eps": Change(0.5, {"linear_cross_entropy": "cut"}, parts.filter_of)},
    ),
    "kernels.batch_invariant": Row(
        parts.choose_kernels,
        {},
        dict.fromkeys(set(TRITON) - {"grouped_gemm", "linear_cross_entropy"}, "triton"),
    ),
    "learning_rate.constant": Row(parts.lr_factors, {"warmup_steps": 2}, WARMUP),
    "learning_rate.cosine": Row(parts.lr_factors, {"warmup_steps": 2}, WARMUP | {"end": 0.5}),
    "learning_rate.inverse_sqrt": Row(parts.lr_factors, {"warmup_steps": 2}, WARMUP | {"timescale": 7}),
    "learning_rate.linear": Row(parts.lr_factors, {"warmup_steps": 2}, WARMUP | {"end": 0.5}),
    "learning_rate.wsd": Row(
        parts.lr_factors,
        {"warmup_steps": 2, "decay_steps": 4},
        WARMUP
        | {
            "end": 0.5,
            "curve": "cosine",
            "decay_steps": 6,
            "decay_tokens": Change(150, {"decay_steps": None}),
            "decay_percent": Change(60.0, {"decay_steps": None}),
        },
    ),
    "learning_rate.piecewise": Row(
        parts.lr_factors,
        {"phases": [{"to": 1.0}]},
        {
            "start": 0.5,
            "phases": [{"to": 2.0}],
            "phases.to": [{"to": 2.0}],
            "phases.curve": [{"to": 1.0, "curve": "cosine"}],
            "phases.steps": [{"to": 1.0, "steps": 3}],
            "phases.until_tokens": [{"to": 1.0, "until_tokens": 130}],
            "phases.until_percent": [{"to": 1.0, "until_percent": 50.0}],
            "phases.power": Change([POLYNOMIAL[0] | {"power": 3.0}], {"phases": POLYNOMIAL}),
        },
    ),
    "listeners.logging": Row(runs.levels_of_logging, {}, {"level": "error"}),
    "listeners.profiler": Row(
        runs.traces_of_run,
        {"wait": 1, "warmup": 1, "active": 1},
        {"wait": 2, "warmup": 2, "active": 2, "repeat": 2, "memory": True},
    ),
    "listeners.replay": Row(runs.steps_of_replays, {}, {"every": 2}),
    "listeners.timeouts": Row(runs.events_of_run, {}, {"first_step": 7.0, "step": 7.0, "saving": 7.0, "opening": 7.0}),
    "loss.cpo": Row(parts.loss_of, {}, {"beta": 0.5, "alpha": 0.5}),
    "loss.ipo": Row(parts.loss_of, {}, {"beta": 0.5, "reference": Change("data", observer=runs.problems_of_loss)}),
    "loss.orpo": Row(parts.loss_of, {}, {"beta": 0.5, "nll": "answer"}),
    "loss.simpo": Row(parts.loss_of, {}, {"beta": 0.5, "gamma": 0.5}),
    "loss.kto": Row(
        policy.judged_loss_of,
        {"beta": 0.2},
        {
            "beta": 0.5,
            "good_weight": 1.5,
            "bad_weight": 0.5,
            "reference": Change("model", observer=runs.problems_of_loss),
        },
    ),
    "loss.reward": Row(policy.reward_loss_of, {}, {"centring": 0.5, "head": NO_HEAD}),
    "loss.classification": Row(
        policy.classification_loss_of, {"labels": ["a", "b"]}, {"labels": ["a", "b", "c"], "head": NO_HEAD}
    ),
    "data.labelled_texts": Row(
        parts.conversations_of,
        {"paths": ["one.labelled"], "labels": ["yes", "no"], "validation_fraction": 0.0, "template": "one.jinja"},
        {
            "paths": ["*.labelled"],
            "labels": Change(["no", "maybe"], refused=True),
            "template": Change("other.jinja", {"date": date(2024, 7, 26)}),
            "date": Change(date(2025, 7, 26), {"template": "other.jinja", "date": date(2024, 7, 26)}),
            "validation_fraction": 0.5,
        },
    ),
    "loss.distill": Row(
        policy.distill_loss_of,
        {},
        {
            "reference": "data",
            "temperature": 2.0,
            "divergence": "reverse",
            "beta": Change(0.2, {"divergence": "jsd"}),
            "task_weight": 0.5,
        },
    ),
    "data.teacher_logps": Row(policy.teacher_of, {"path": "one_teacher"}, {"path": "other_teacher"}),
    "loss.grpo": Row(
        policy.policy_loss_of,
        {},
        {
            "variant": "dapo",
            "clip_low": 0.9,
            "clip_high": 3.0,
            "mean": "tokens",
            "reference": Change("adapters", refused=True),  # without beta
            "beta": Change(0.5, {"reference": "adapters", "beta": 0.1}),
            "correction": "token_mask",
            "correction_cap": Change(1.5, {"correction": "token_truncate"}),
        },
    ),
    "loss.dpo": Row(parts.loss_of, {}, {"beta": 0.5, "reference": Change("data", observer=runs.problems_of_loss)}),
    "loss.multi_token": Row(
        policy.further_loss_of,
        {},
        {"z_loss": 0.1, "label_smoothing": 0.1, "accuracy": True, "top_k": 3, "depth": 2, "coefficient": 0.5}
        | {"layers": NO_HEAD},
    ),
    "loss.next_token": Row(parts.loss_of, {}, {"z_loss": 0.1, "label_smoothing": 0.1, "accuracy": True, "top_k": 3}),
    "metrics.auroc": Row(parts.count_sums, {"bins": 4}, {"bins": 6, "of": "other"}),
    "metrics.bits_per_byte": Row(parts.measure_bytes, {}, {"of": "accuracy"}),
    "metrics.classification": Row(
        parts.count_sums, {"classes": 2}, {"classes": 3, "of": "other", "averages": ["macro", "weighted"], "beta": 2.0}
    ),
    "metrics.expert_load": Row(parts.route_microbatch, {}, {"by_expert": True}),
    "metrics.group": Row(parts.measure_microbatches, {}, {"prefix": "train/"}),
    "metrics.histograms": Row(
        parts.distributions_of,
        {"targets": ["*norm"], "every": 1},
        {"targets": ["*"], "of": ["weights"], "per": "pattern", "bins": 3, "every": 2},
    ),
    "metrics.mean": Row(
        parts.measure_microbatches, {"of": "loss"}, {"of": "accuracy", "per": "microbatch", "name": "other"}
    ),
    "metrics.memory": Row(parts.metric_names, {}, {"by_kind": True}),
    "metrics.multilabel": Row(
        parts.count_sums, {"labels": 2}, {"labels": 3, "of": "other", "averages": ["weighted"], "beta": 2.0}
    ),
    "metrics.perplexity": Row(parts.measure_microbatches, {}, {"of": "accuracy"}),
    "metrics.spread": Row(
        parts.measure_microbatches,
        {"quantiles": [0.5], "bins": 10},
        {"of": "accuracy", "quantiles": [0.9], "low": 1.0, "high": 10.0, "bins": 7},
    ),
    "metrics.utilization": Row(parts.utilization_of, {"peak_tflops": 1.0}, {"peak_tflops": 2.0}),
    "model.auto": Row(
        parts.model_of,
        {"path": "one.json", "weights": False},
        {
            "path": "other_llama.json",
            "new_tokens": 4,
            "weights": Change(True, {"path": "exported"}, parts.initial_weights_of),
        },
    ),
    "model.dots1": Row(parts.model_of, SPARSE_SIZES, MODEL | SHARED_EXPERTS),
    "model.deepseek_v2": Row(
        parts.model_of,
        LATENT_SIZES,
        {key: change for key, change in LATENT.items() if key not in ("norm_topk_prob", "rope_interleave")}
        | {
            "config": config("deepseek_v2"),
            "n_shared_experts": 3,
            "mlp_bias": True,
            "router_aux_loss_coef": 0.5,
        },
    ),
    "model.phi3": Row(
        parts.model_of,
        SIZES | {"max_position_embeddings": 64},
        MODEL
        | rope_changes(LONG_ONLY, OF_OTHERS)
        | {
            "config": config("phi3"),
            "rope_scaling": LONG,
            "max_position_embeddings": Change(128, observer=parts.config_of),
            "partial_rotary_factor": 0.5,
            "sliding_window": 3,
        },
    ),
    "model.deepseek_v3": Row(parts.model_of, LATENT_SIZES, LATENT | {"config": config("deepseek_v3")}),
    "model.glm4_moe": Row(
        parts.model_of,
        SPARSE_SIZES | {"partial_rotary_factor": 1.0},
        MODEL
        | GROUPED
        | {
            "config": config("glm4_moe"),
            "partial_rotary_factor": 0.25,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "model.deepseek_v32": Row(parts.model_of, LATENT_SIZES | INDEX_SIZES, INDEXED | {"config": config("deepseek_v32")}),
    "model.glm_moe_dsa": Row(
        parts.model_of,
        LATENT_SIZES | INDEX_SIZES,
        INDEXED | {"config": config("glm_moe_dsa"), "indexer_types": ["full", "shared"]},
    ),
    "model.glm4_moe_lite": Row(parts.model_of, LATENT_SIZES, LATENT | {"config": config("glm4_moe_lite")}),
    "model.gemma3": Row(
        parts.model_of,
        TYPED_SIZES,
        MODEL
        | LAYER_TYPES
        | {
            "config": config("gemma3"),
            "tie_word_embeddings": False,
            "rope_local_base_freq": 10.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "model.gemma4": Row(
        parts.model_of,
        SIZES | {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 24},
        {key: change for key, change in MODEL.items() if key in ("rope_theta",) or "rope_" not in key}
        | {
            "config": config("gemma4"),
            "num_hidden_layers": 4,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * 4,
            "sliding_window": 3,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "rope_local_base_freq": 10.0,
            "global_head_dim": 8,
            "num_global_key_value_heads": Change(1, {"attention_k_eq_v": True}),
            "attention_k_eq_v": True,
            "final_logit_softcapping": 0.5,
            "num_kv_shared_layers": Change(1, {"layer_types": ["full_attention"] * 2}),
            "use_double_wide_mlp": Change(True, {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1}),
            "hidden_size_per_layer_input": 8,
            "num_experts": Change(6, GEMMA_EXPERTS),
            "num_experts_per_tok": Change(3, GEMMA_EXPERTS),
            "moe_intermediate_size": Change(16, GEMMA_EXPERTS),
            "router_aux_loss_coef": Change(0.5, GEMMA_EXPERTS),
            "router_z_loss_coef": Change(0.5, GEMMA_EXPERTS),
        },
    ),
    "model.gpt_oss": Row(
        parts.model_of,
        TYPED_SIZES | {"num_experts": 5, "num_experts_per_tok": 2},
        MODEL
        | LAYER_TYPES
        | {
            "config": config("gpt_oss"),
            "attention_bias": False,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "swiglu_alpha": 0.5,
            "swiglu_limit": 1e-3,
            "router_aux_loss_coef": 0.5,
            "router_z_loss_coef": 0.5,
        },
    ),
    "model.minimax_m2": Row(
        parts.model_of,
        SIZES | {"num_experts": 5, "num_experts_per_tok": 2, "partial_rotary_factor": 1.0},
        MODEL
        | {
            "config": config("minimax_m2"),
            "partial_rotary_factor": 0.5,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "router_aux_loss_coef": 0.5,
            "router_z_loss_coef": 0.5,
        },
    ),
    "model.qwen3_5": Row(parts.model_of, HYBRID_SIZES, HYBRID | {"config": config("qwen3_5")}),
    "model.qwen3_5_moe": Row(
        parts.model_of,
        HYBRID_SIZES | SPARSE_SIZES,
        HYBRID
        | {key: change for key, change in EXPERTS.items() if key not in SPARSE_KEYS}
        | {
            "config": config("qwen3_5_moe"),
            "shared_expert_intermediate_size": 20,
            "intermediate_size": Change(48, observer=parts.config_of),
        },
    ),
    "model.qwen3_next": Row(
        parts.model_of,
        HYBRID_SIZES | SPARSE_SIZES,
        HYBRID | EXPERTS | {"config": config("qwen3_next"), "shared_expert_intermediate_size": 20},
    ),
    "model.granite": Row(
        parts.model_of,
        SIZES,
        MODEL
        | {"config": config("granite"), "attention_bias": True, "mlp_bias": True}
        | {f"{name}_multiplier": 0.5 for name in ("embedding", "attention", "residual")}
        | {"logits_scaling": 2.0},
    ),
    "model.parametrization.mup": Row(parts.scaling_of, {"base_hidden_size": 16}, {"base_hidden_size": 32}),
    "model.parametrization.completep": Row(
        parts.scaling_of,
        {"base_hidden_size": 16, "base_num_hidden_layers": 2},
        {"base_hidden_size": 32, "base_num_hidden_layers": 4},
    ),
    "model.olmo2": Row(parts.model_of, SIZES, MODEL | {"config": config("olmo2"), "attention_bias": True}),
    "model.olmo_hybrid": Row(
        parts.model_of,
        {key: value for key, value in HYBRID_SIZES.items() if key != "partial_rotary_factor"},
        {key: change for key, change in HYBRID.items() if key != "partial_rotary_factor" and "rope_" not in key}
        | {"config": config("olmo_hybrid"), "linear_allow_neg_eigval": False},
    ),
    "model.pattern": Row(
        parts.model_of,
        SIZES | DELTA | {"layers": "attention, gdn"},
        {key: change for key, change in HYBRID.items() if key not in ("partial_rotary_factor", "layer_types")}
        | {
            "config": config("pattern"),
            "layers": "gdn",
            "num_hidden_layers": 4,
            "sliding_window": Change(3, {"layers": "window, gdn"}),
            "attention_gate": True,
            "use_qk_norm": False,
            "residual": "hyper",
            "residual_streams": Change(3, {"residual": "hyper"}),
            "conv_L_cache": Change(4, {"layers": "conv, gdn"}),
        },
    ),
    "model.kimi_linear": Row(
        parts.model_of,
        LATENT_SIZES | {"layer_types": ["linear_attention", "full_attention"] * 2} | LINEAR_SIZES,
        {key: change for key, change in LATENT.items() if "rope_" not in key}
        | {
            "config": config("kimi_linear"),
            "tie_word_embeddings": Change(True, refused=True),
            "layer_types": ["full_attention"] * 4,
            "linear_num_heads": 3,
            "linear_head_dim": 6,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "model.olmo3": Row(parts.model_of, TYPED_SIZES, MODEL | LAYER_TYPES | {"config": config("olmo3")}),
    "model.transformers": Row(
        parts.model_of,
        {"path": "one.json", "weights": False},
        {"path": "other_llama.json", "weights": Change(True, {"path": "exported"}, parts.initial_weights_of)},
    ),
    "model.nemotron_h": Row(
        parts.model_of,
        SPARSE_SIZES | MAMBA_SIZES | {"num_hidden_layers": 4},
        {
            key: change
            for key, change in (MODEL | GROUPED).items()
            if "rope_" not in key and key not in ("n_shared_experts", "first_k_dense_replace")
        }
        | {
            "config": config("nemotron_h"),
            "tie_word_embeddings": Change(True, refused=True),
            "layer_types": ["moe", "linear_attention"] * 2,
            "intermediate_size": Change(48, {"layer_types": ["mlp"] * 4}),
            "moe_shared_expert_intermediate_size": 8,
            "moe_latent_size": 10,
            "mamba_num_heads": 2,
            "mamba_head_dim": 6,
            "n_groups": 1,
            "ssm_state_size": 6,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "time_step_min": 9.0,
        },
    ),
    "model.lfm2": Row(
        parts.model_of,
        SIZES | {"layer_types": ["conv", "full_attention", "conv"]},
        MODEL
        | {
            "config": config("lfm2"),
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * 3,
            "conv_L_cache": 4,
        },
    ),
    "model.smollm3": Row(
        parts.model_of,
        SIZES,
        MODEL
        | {
            "config": config("smollm3"),
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "no_rope_layers": [1, 0],
            "use_sliding_window": Change(True, {"sliding_window": 3, "no_rope_layers": [1, 0]}),
            "sliding_window": Change(3, {"use_sliding_window": True, "no_rope_layers": [1, 0]}),
        },
    ),
    "model.llama": Row(
        parts.model_of, SIZES, MODEL | {"config": config("llama")} | {"attention_bias": True, "mlp_bias": True}
    ),
    "model.mistral": Row(parts.model_of, SIZES, MODEL | {"config": config("mistral"), "sliding_window": 3}),
    "model.qwen2": Row(
        parts.model_of,
        SIZES,
        MODEL
        | {"config": config("qwen2")}
        | {
            "use_sliding_window": Change(True, {"sliding_window": 3, "max_window_layers": 1}),
            "sliding_window": Change(3, {"use_sliding_window": True, "max_window_layers": 1}),
            "max_window_layers": Change(1, {"use_sliding_window": True, "sliding_window": 3}),
        },
    ),
    "model.qwen3.dense": Row(parts.model_of, SIZES, MODEL),
    "model.qwen3.moe": Row(parts.model_of, SPARSE_SIZES, MODEL | EXPERTS),
    "optim.adam": Row(
        parts.weights_after_steps, {"lr": 0.01}, BETAS | GROUPS | BETAS_OF_GROUP | VARIANTS | HOST_STATES
    ),
    "optim.adamw": Row(
        parts.weights_after_steps, {"lr": 0.01}, BETAS | GROUPS | BETAS_OF_GROUP | VARIANTS | HOST_STATES
    ),
    "optim.muon": Row(
        parts.weights_after_steps,
        {"lr": 0.01},
        BETAS
        | GROUPS
        | BETAS_OF_GROUP
        | HOST_STATES
        | {
            "targets": Change(["*norm"], refused=True),
            "adjust_lr_fn": "original",
            "momentum": 0.5,
            "nesterov": False,
            "ns_steps": 2,
            "maximize": True,
        },
    ),
    "optim.sgd": Row(
        parts.weights_after_steps,
        {"lr": 0.01},
        GROUPS
        | HOST_STATES
        | {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.5, "dampening": 0.5, "nesterov": True, "maximize": True},
    ),
    "optim.stochastic_adamw": Row(
        parts.weights_after_steps,
        {"lr": 0.01},
        BETAS
        | GROUPS
        | BETAS_OF_GROUP
        | VARIANTS
        | {"state_dtype": "float32", "split_master_weights": True}
        | HOST_STATES,
    ),
    "phases.budget": Row(parts.reasons_to_stop, {"tokens": 200}, {"tokens": 100, "minutes": 1.0}),
    "phases.divergence": Row(parts.end_after_lost_steps, {"steps": 2, "factor": 2.0}, {"steps": 3, "factor": 3.0}),
    "phases.early_stopping": Row(
        parts.reasons_to_stop, {}, {"metric": "loss", "patience": 1, "min_change": 0.5, "best_is": "highest"}
    ),
    "phases.ema": Row(parts.average_weights, {}, {"decay": 0.5}),
    "phases.advantages": Row(
        policy.advantages_of,
        {},
        {"baseline": "others", "scale": "std", "equal_groups": "drop", "truncated": "drop"},
    ),
    "phases.record_rollouts": Row(policy.record_steps, {}, {"every": 2, "rows": 1}),
    "phases.rollout": Row(
        policy.rollouts_of, {}, {"group_size": 3, "minibatches": 2, "epochs": 2, "lag": 1, "max_age": 0}
    ),
    "phases.evaluate_rewards": Row(policy.rollouts_of, EVERY, {"samples": 3, "every": 3, "at_start": False}),
    "rewards.code": Row(
        policy.scores_of,
        {"seconds": 5.0},
        {
            "weight": 2.0,
            "key": "wrong",
            "seconds": Change(0.1, {"key": "more"}),
            "memory": 0.05,
            "parallel": Change(0, refused=True),
        },
    ),
    "rewards.environment": Row(policy.scores_of, {}, {"weight": 2.0, "cut": -1.0, "by_fault": -0.5}),
    "rollouts.turns": Row(policy.turns_of, {}, {"max_turns": 2, "seconds": 0.005}),
    "environments.tools": Row(
        policy.replies_of,
        {"seconds": 5.0, "memory": 0.2},
        {
            "calls": "brackets",
            "seconds": 0.2,
            "memory": 1.0,
            "characters": 3,
            "processes": Change(0, refused=True),
        },
    ),
    "environments.verifiers": Row(
        policy.verifiers_replies_of,
        {"environment": "adder"},
        {
            "environment": "talk",
            "arguments": {"weight": 4.0},
            "seconds": Change(1, observer=policy.slow_verifiers_reply_of),
        },
    ),
    "rewards.exact_match": Row(policy.scores_of, {}, {"weight": 2.0, "key": "other"}),
    "rewards.json_schema": Row(
        policy.scores_of, {"json_schema": {"type": "array"}}, {"weight": 2.0, "json_schema": {"type": "number"}}
    ),
    "rewards.length": Row(
        policy.scores_of, {"max_tokens": 6, "buffer": 2}, {"weight": 2.0, "max_tokens": 7, "buffer": 1}
    ),
    "rewards.math_equal": Row(policy.scores_of, {}, {"weight": 2.0, "key": "other", "tolerance": 0.1}),
    "rewards.regex": Row(policy.scores_of, {"pattern": "1"}, {"weight": 2.0, "pattern": "3"}),
    "rollouts.stages": Row(
        policy.completions_of, {"max_tokens": 4}, {"max_tokens": 5, "temperature": 0.5, "exact": True}
    ),
    "rollouts.server": Row(
        policy.server_of,
        {"max_tokens": 4, "retries": 0},
        {
            "max_tokens": 5,
            "temperature": 0.5,
            "url": Change("http://127.0.0.1:9", refused=True),
            "served_model": Change("other", refused=True),
            "update_every": 2,
            "version_path": "",
            "in_flight": Change(True, observer=policy.exchange_of),
            "reload": Change([OTHER_RELOAD], {"version_path": ""}),
            "reload.path": Change([OTHER_RELOAD], {"version_path": "", "reload": [{"path": "/reset_prefix_cache"}]}),
            "reload.body": Change([{**OTHER_RELOAD, "body": {"path": "{folder}"}}], {"version_path": ""}),
            "connections": 1,
            "timeout": Change(1e-6, refused=True),
            "rows_per_request": 2,
            "retries": Change(1, observer=policy.retries_of),
        },
    ),
    "data.prompt_collator": Row(
        policy.encode_prompts,
        {},
        {
            "template": Change("other.jinja", {"template": "one.jinja", "date": date(2025, 1, 31)}),
            "date": Change(date(2026, 1, 31), {"template": "other.jinja", "date": date(2025, 1, 31)}),
        },
    ),
    "data.template_prompts": Row(
        policy.encode_messages_as_prompt,
        {},
        {
            "template": Change("other.jinja", {"template": "one.jinja", "date": date(2025, 1, 31)}),
            "date": Change(date(2026, 1, 31), {"template": "other.jinja", "date": date(2025, 1, 31)}),
            "system": "good day",
        },
    ),
    "data.sums": Row(
        policy.digits_of, {"examples_drawn": 40}, {"digits": 2, "examples_drawn": 50, "validation_fraction": 0.9}
    ),
    "data.sort_digits": Row(
        policy.digits_of,
        {"examples_drawn": 40},
        {"digits": 3, "examples_drawn": 50, "validation_fraction": 0.9},
    ),
    "phases.evaluate": Row(runs.steps_of_phase, {}, EVERY | {"at_start": True}),
    "phases.compare_replicas": Row(runs.compared_steps, {}, {"every": 2}),
    "phases.garbage_collection": Row(runs.steps_of_phase, {}, EVERY | {"before_saves": True}),
    "phases.loss_spikes": Row(
        parts.detect_spikes,
        {"window": 3, "deviations": 3.0, "go_back": 1},
        {"window": 5, "deviations": 99.0, "go_back": 0},
    ),
    "phases.router_bias": Row(parts.route_microbatch, {}, {"update_rate": 0.5}),
    "phases.report": Row(runs.steps_of_phase, {}, EVERY),
    "pipeline.from_csv": Row(parts.program, {"path": "one.csv"}, {"path": "other.csv"}),
    "pipeline.schedules.auto": Row(
        parts.program,
        {"memory": 2.5, "comm": 0.25, "trials": 40},
        {
            "forward": 3.0,
            "backward_input": 3.0,
            "backward_weight": 3.0,
            "comm": 1.0,
            "slices": [1.0, 1.0, 1.0, 3.0],
            "per_stage": 9.0,
            "activations": [1.0, 1.0, 1.0, 2.0],
            "pending": Change([0.1] * 4, {"activations": [1.0] * 4}),
            "recompute": {"blocks": {"again": 1.0, "kept": 0.1}},
            "recompute.again": Change({"blocks": {"again": 9.0, "kept": 0.1}}, AGAIN),
            "recompute.kept": Change({"blocks": {"again": 0.2, "kept": 0.99}}, AGAIN),
            "offload": Change(0.1, {"memory": 2.0}),
            "memory": 3.0,
            "stages_per_rank": 1,
            "microbatches": 1,
            "trials": 0,
        },
    ),
    "pipeline.schedules.circular": Row(parts.program, {}, {"stages_per_rank": 3, "pipeline_parallel_layers": 8}),
    "pipeline.schedules.interleaved_1f1b": STAGES_PER_RANK,
    "pipeline.schedules.looped_bfs": STAGES_PER_RANK,
    "pipeline.schedules.one_f_one_b": Row(parts.program, {}, {"hide_latency": True}),
    "pipeline.schedules.zero_bubble_1p": STAGES_PER_RANK,
    "pipeline.schedules.v_half": Row(parts.program, {}, {"comm": 1.0}),
    "pipeline.schedules.v_min": Row(parts.program, {}, {"comm": 1.0}),
    "stages.grafted": Row(
        runs.grafted_weights_of,
        {"folder": "exported", "new": ["*.q_proj.*"]},
        {"folder": Change("no_folder", refused=True), "new": ["*.k_proj.*"]},
    ),
    "stages.frozen": Row(runs.frozen_weights_of, {}, {"weights": Change("no_folder", refused=True)}),
    "stages.materialized": Row(
        runs.stages_of,
        {},
        {
            "embedding_layer_cost": 2,
            "head_layer_cost": 2,
            "weights": "exported",
            "bucket_bytes": Change(4, observer=runs.sums_over_replicas),
            "recompute": Change("blocks", observer=runs.count_recomputations),
        },
    ),
    "planning.check": Row(runs.plan_refuses, {}, {"refuse": False}),
    "planning.memory": Row(
        runs.memory_choices,
        {},
        {
            "limit": 1e6,
            "host_limit": Change(1.0, {"limit": 1.35e7}),
            "quantize": Change(True, {"limit": 2.4e10, "host_limit": 1.0}, observer=runs.memory_choices_of_wide_layers),
        },
    ),
    "run.batch": Row(
        parts.rows_of_steps,
        {"global_size": 16, "micro_size": 4},
        {"global_size": 8, "micro_size": 2, "deal": "in_turn", "ramp": RAMP}
        | {"ramp.size": RAMP, "ramp.until_step": RAMP, "ramp.until_tokens": [{"size": 8, "until_tokens": 9}]},
    ),
    "run.job": Row(runs.randomness_of, {"name": "one"}, {"name": "other", "folder": "elsewhere", "seed": 1}),
    "run.randomness": Row(runs.randomness_of, {}, {"deterministic": True}),
    "run.signals": Row(runs.stops, {}, {"grace": 0.05, "extra_signals": ["SIGUSR1"]}),
    "run.trainer": Row(
        runs.run_trainer,
        {"steps": 3},
        {"steps": 4, "max_skipped_steps": 2, "epochs": Change(2.0, {"steps": None})},
    ),
    "sampling.sample": Row(
        runs.write_sample,
        {"prompt": "abc", "tokens": 20},
        {"prompt": "xyz", "tokens": 10, "context": 2, "temperature": 0.1, "top_k": 2},
    ),
    "trackers.csv": Row(runs.tracker_calls, {}, {"queue_size": 7, "timeout": 7.0}),
    "trackers.tensorboard": Row(runs.tracker_calls, {}, {"queue_size": 7, "timeout": 7.0}),
    "trackers.trackio": Row(
        runs.tracker_calls, {}, {"queue_size": 7, "timeout": 7.0, "project": "other", "space": "some/space"}
    ),
    "trackers.wandb": Row(
        runs.tracker_calls,
        {},
        {"queue_size": 7, "timeout": 7.0, "project": "other", "entity": "some", "mode": "offline"},
    ),
    "trackers.mlflow": Row(
        runs.tracker_calls,
        {},
        {"queue_size": 7, "timeout": 7.0, "experiment": "other", "uri": "https://host:5000"},
    ),
    "trackers.aim": Row(
        runs.aim_calls,
        {},
        {
            "queue_size": 7,
            "timeout": 7.0,
            "repository": "aim://host:5",
            "experiment": "other",
            "system_metrics": 30.0,
        },
    ),
}

UNOBSERVED = {
    (
        "stages.materialized",
        "reshard_after_forward",
    ): "it needs ranks that shard: test_fsdp.py has them",
    ("stages.materialized", "adapter_weights"): "it needs an adapter's folder: tests/runs/test_adapters.py has one",
    (
        "checkpoint.checkpointer",
        "neighbour_every",
    ): "it needs ranks that are lost: tests/runs/test_survival.py has them",
    ("stages.materialized", "sync_each_microbatch"): "the same: test_fsdp.py and tests/meshes/test_steps.py",
    ("distributed.device", "share"): "it needs GPUs: test_device.py pretends to have some, and tests/gpu share one",
    ("optim.stochastic_adamw", "implementation"): "it is about speed: both give the same bits, as tests of kernels say",
    **dict.fromkeys(
        (
            ("checkpoint.checkpointer", "every.epochs"),
            ("checkpoint.checkpointer", "neighbour_every.epochs"),
            ("listeners.replay", "every.epochs"),
            ("metrics.histograms", "every.epochs"),
            ("phases.compare_replicas", "every.epochs"),
            ("phases.evaluate", "every.epochs"),
            ("phases.evaluate_rewards", "every.epochs"),
            ("phases.garbage_collection", "every.epochs"),
            ("phases.record_rollouts", "every.epochs"),
            ("phases.report", "every.epochs"),
        ),
        "all have `is_due`: tests/components/data/test_loader.py",
    ),
}
"""Settings whose effect can't be observed on a CPU, and why."""
