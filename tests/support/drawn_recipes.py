"""Random recipes of small models, and meshes for them, drawn from all settings of components."""

import math
from random import Random

import attrs

LENGTH = 32
FAMILIES = ("qwen3.dense", "llama", "qwen2", "mistral", "qwen3.moe", "dots1")
SCHEDULES = (
    *("one_f_one_b", "gpipe", "interleaved_1f1b", "looped_bfs", "zero_bubble_1p", "zero_bubble_h2"),
    *("zero_bubble_v", "v_half", "v_min", "dual_pipe_v", "circular", "auto"),
)
OPTIMIZERS = {"adamw": "1e-2", "adam": "1e-2", "sgd": "0.1", "muon": "1e-2"}
"""Learning rates by optimizer."""
OF_EXPERTS = ("model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=8")


@attrs.frozen
class Drawn:
    """The command-line words of a recipe, with its kind of model and optimizer."""

    family: str
    optimizer: str
    words: tuple[str, ...]

    @property
    def has_experts(self) -> bool:
        return self.family in ("qwen3.moe", "dots1")


def recipe(draw: Random) -> Drawn:
    """Draw a model with its optimizer, loss, clipping, packing, recomputation and adapters, in float64."""
    family, optimizer = draw.choice(FAMILIES), draw.choice(list(OPTIMIZERS))
    words = [
        f"model.use=model.{family}",
        f"model.num_hidden_layers={draw.choice((4, 5, 8))}",
        *("model.hidden_size=16", "model.num_attention_heads=4", "model.head_dim=4"),
        f"model.num_key_value_heads={draw.choice((2, 4, 4))}",
        f"model.tie_word_embeddings={draw.choice(('true', 'false'))}",
        *_sizes(draw, family),
        f"batch.global_size={draw.choice((4, 8, 12, 12))}",
        f"validation.rows_used={draw.choice((1, 3, 5, 8))}",
        f"optimizer.use=optim.{optimizer}",
        f"optimizer.lr={OPTIMIZERS[optimizer]}",
    ]
    frozen = draw.random() < 0.3
    if not frozen and draw.random() < 0.3:
        groups = '{targets=["*norm*"],lr_multiplier=0.5}, {targets=["*embed*"],weight_decay=0.3}'
        words += [f"optimizer.groups=[{groups}]"]
    words += draw.choice(([], [], _clip_value(), _clip_norm(draw)))
    words += draw.choice(([], [], ["loss.use=loss.dft"], ["loss.z_loss=0.01"], ["loss.label_smoothing=0.1"]))
    words += draw.choice(([], [], *([f"stages.recompute={policy}"] for policy in ("blocks", "selective", "2"))))
    if draw.random() < 0.3:
        packing = draw.choice(("best_fit", "first_fit", "padded"))
        words += [f"packing.use=data.packing.{packing}", f"packing.length={LENGTH}"]
    if frozen:
        words += ['stages.adapters=["@adapters.*"]', "adapters.lora.use=adapters.lora"]
        words += ['adapters.lora.targets=["q_proj", "v_proj", "o_proj"]']
        words += ["adapters.lora.rank=2", "adapters.lora.alpha=4.0"]
        words += draw.choice(([], ["adapters.lora.dora=true"], ["adapters.lora.rslora=true"]))
    return Drawn(family, optimizer, tuple(words))


def _sizes(draw: Random, family: str) -> list[str]:
    """Draw the sizes specific to this family of models."""
    width = f"model.intermediate_size={draw.choice((24, 24, 30))}"
    match family:
        case "qwen3.moe":
            return [*OF_EXPERTS, *draw.choice(([], ["model.router_aux_loss_coef=0.1"]))]
        case "dots1":
            return [*OF_EXPERTS, width, "model.n_shared_experts=1", "model.first_k_dense_replace=1"]
        case "mistral":
            return [width, f"model.sliding_window={draw.choice((5, 20))}"]
        case "qwen2":
            window = ["model.use_sliding_window=true", "model.sliding_window=7", "model.max_window_layers=1"]
            return [width, *draw.choice(([], window))]
    return [width]


def _clip_value() -> list[str]:
    return ["clip.use=gradients.clip_value", "clip.max_value=0.01"]


def _clip_norm(draw: Random) -> list[str]:
    words = ["clip.use=gradients.clip_group_norm", "clip.max_norm=0.05"]
    targets = draw.choice(([], ['clip.targets=["*layers*"]'], ['clip.targets=["*norm*", "*lora*"]']))
    return [*words, f"clip.norm_type={draw.choice(('1.0', '2.0', '3.0', 'inf'))}", *targets]


def mesh(draw: Random, drawn: Drawn) -> tuple[int, tuple[str, ...]]:
    """Draw ranks and mesh sizes for a recipe; most of these meshes fit it."""
    factors = draw.choice(((2,), (3,), (2, 2), (2, 2)))
    sizes = dict.fromkeys(("pipeline", "data_replicate", "data_shard", "context", "tensor"), 1)
    for factor in factors:
        sizes[draw.choice(list(sizes))] *= factor
    replicas = sizes["data_replicate"] * sizes["data_shard"]
    words = [f"mesh.{name}={size}" for name, size in sizes.items()]
    words += [f"batch.micro_size={1 if replicas == 4 else draw.choice((1, 2))}"]
    if sizes["pipeline"] > 1:
        schedule = draw.choice(SCHEDULES)
        words += [f"schedule.use=pipeline.schedules.{schedule}"]
        words += ["executor.use=pipeline.circular.executor"] if schedule == "circular" else []
    shared = replicas * sizes["context"] * sizes["tensor"]
    if drawn.has_experts and draw.random() < 0.6:
        words += [f"mesh.expert={draw.choice([size for size in (1, 2, 3, 4) if shared % size == 0])}"]
    if sizes["data_shard"] > 1:
        words += draw.choice(([], ["stages.sync_each_microbatch=true"]))
        words += draw.choice(([], ["stages.reshard_after_forward=true"], ["stages.reshard_after_forward=false"]))
    words += draw.choice(([], ["stages.bucket_bytes=4096"]))
    return math.prod(factors), tuple(words)
