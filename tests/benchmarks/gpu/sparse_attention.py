"""
Attention with an indexer (DSA) beside dense latent attention, in a layer like DeepSeek-V3.2's.

`make bench NAME=sparse_attention` takes 2 minutes. It prints errors against float64 for packed documents. For rows with
8192 and 32768 tokens, or other lengths in `ONLY="32768 65536"`, it prints milliseconds and memory for the forward pass
and both passes: a layer's attention, without the projections common to both, and single operations. Kernels' own times
follow, and operations with other tiles at 32768 tokens.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.clock import error, now, show_kernels
from drawloom.components.model.decoder.latent import LatentInputs
from drawloom.components.model.decoder.specs import LayerContext
from drawloom.components.model.deepseek_v3 import DeepseekV3
from drawloom.components.model.deepseek_v32 import DeepseekV32
from drawloom.components.ports.model import LayerRange
from drawloom.kernels.attention.cudnn import choose_one_document_implementation
from drawloom.kernels.sparse_attention import eager, triton
from support.qwen3 import kernels_on

HIDDEN, HEADS, LATENT, ROPE, NOPE, QUERY_RANK, CHOSEN = 7168, 128, 512, 64, 128, 1536, 2048
INDEX_HEADS, INDEX_WIDTH, SCALE = 64, 128, 192**-0.5
LENGTHS, VARIED_LENGTH = (8192, 32768), 32768
DOCUMENTS = (300, 2260)
"""Documents' lengths for errors; in the second one most tokens see more keys than are chosen."""

FORWARDS, BOTH, CHOICE, CHOICE_BOTH = "attention, forwards", "attention, both", "choice, forwards", "choice, both"
VARIANTS: list[tuple[str, str, dict[str, int]]] = [
    *((BOTH, "pairs", {"num_warps": warps, "num_stages": stages}) for warps, stages in ((8, 3), (4, 2), (4, 4))),
    *((BOTH, "mixed", {"COLUMNS": columns, "num_warps": warps}) for columns, warps in ((64, 4), (128, 8), (256, 8))),
    *((BOTH, "sums", {"ENTRIES": entries, "num_warps": warps}) for entries, warps in ((4, 2), (4, 4), (8, 2), (16, 8))),
    *((CHOICE, "scores", {"num_stages": stages}) for stages in (2, 4)),
    (CHOICE, "scores", {"BLOCK": 128, "num_warps": 8}),
]
"""Operations with other options for a kernel's tiles."""

CHUNKS = (2**30, 2**32)

Call = Callable[[], Any]


def main() -> None:
    """Print all lines."""
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}", flush=True)
    torch.manual_seed(0)
    _try("errors", _show_errors)
    for length in map(int, sys.argv[1:] or LENGTHS):
        print(f"\n{length:,} tokens", flush=True)
        for part in (_show_layers, _show_operations):
            _try(part.__name__, partial(part, length))
    print(f"\nother tiles, {VARIED_LENGTH:,} tokens", flush=True)
    calls, tiles = _create_operations(VARIED_LENGTH), triton.TILES
    for name in (BOTH, CHOICE):
        _show(name, calls[name])
    for name, kernel, options in VARIANTS:
        triton.TILES = tiles | {kernel: tiles[kernel] | options}
        _try(kernel, partial(_show, f"{name}, {kernel} {options}", calls[name]))
    triton.TILES, default = tiles, triton.CHUNK_BYTES
    for triton.CHUNK_BYTES in CHUNKS:
        name = f"{BOTH} in chunks with {triton.CHUNK_BYTES / 2**30:.0f} GiB"
        _try(name, partial(_show, name, calls[BOTH]))
    triton.CHUNK_BYTES = default


def _try(name: str, run: Call) -> None:
    """Run a part, and print its error if it fails, as without shared memory."""
    try:
        run()
    except Exception as problem:
        print(f"  {name}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
    torch.cuda.empty_cache()


def _draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16().requires_grad_()


def _show(name: str, call: Call) -> None:
    """Print a call's milliseconds, the median of three after one, and its peak memory beyond that in use before."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(3):
        start = now(True)
        call()
        end = now(True)
        end.synchronize()
        times.append(start.elapsed_time(end))
    memory = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"  {name}: {median(times):.2f} ms, {memory:.1f} GiB", flush=True)


def _draw_index_inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    factors = torch.randn(1, length, INDEX_HEADS, device="cuda") * (INDEX_HEADS * INDEX_WIDTH) ** -0.5
    return _draw(1, length, INDEX_HEADS, INDEX_WIDTH), _draw(1, length, INDEX_WIDTH), factors.requires_grad_()


def _show_errors() -> None:
    """Print errors for packed documents, and whether gradients have the same bits in a second run."""
    length = sum(DOCUMENTS)
    starts = torch.tensor([0, DOCUMENTS[0]], dtype=torch.int32)
    first = starts.repeat_interleave(torch.tensor(DOCUMENTS))[None].cuda()
    counts = torch.arange(1, length + 1, dtype=torch.int32, device="cuda")[None] - first
    index = _draw_index_inputs(length)
    choice, _ = triton.choose_keys_triton(*index, first, counts, CHOSEN)

    def score(queries: Tensor, keys: Tensor, factors: Tensor) -> Tensor:
        return triton.choose_keys_triton(queries, keys, factors, first, counts, CHOSEN)[1]

    def score_exactly(queries: Tensor, keys: Tensor, factors: Tensor) -> Tensor:
        every, scores = eager.choose_keys_eager(queries, keys, factors, first, counts, length)
        by_key = torch.zeros_like(scores).scatter(-1, every.long() % length, scores.masked_fill(every < 0, 0))
        best = by_key.masked_fill(by_key == 0, -torch.inf).topk(CHOSEN).values.amin(-1, keepdim=True)
        chosen = by_key.gather(-1, choice.clamp(min=0).long())
        print(f"  keys beside the best {CHOSEN}: {((chosen < best) & (choice >= 0)).sum().item()}", flush=True)
        return chosen.masked_fill(choice < 0, 0)

    _show_error("choice", score, score_exactly, index, ())
    inputs = _draw(1, length, HEADS, LATENT + ROPE), _draw(1, length, LATENT + ROPE, scale=0.3)
    options = choice, LATENT, SCALE
    _show_error("attention", triton.sparse_attention_triton, eager.sparse_attention_eager, inputs, options)


def _show_error(
    name: str,
    rule: Callable[..., Any],
    exact_rule: Callable[..., Any],
    inputs: Sequence[Tensor],
    options: tuple[Any, ...],
) -> None:
    wide = [x.detach().double().requires_grad_() for x in inputs]
    results: list[Any] = []
    for call, learned in ((rule, inputs), (exact_rule, wide), (rule, inputs)):
        result = call(*learned, *options)
        tensors = [x.masked_fill(x == -torch.inf, 0) for x in (result if isinstance(result, tuple) else (result,))]
        seed = torch.randn(tensors[0].shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
        results.append([*tensors, *torch.autograd.grad(tensors[0], learned, seed.to(tensors[0].dtype))])
    errors = " ".join(f"{error([x], [y]):.1e}" for x, y in zip(results[0], results[1], strict=True))
    same = all(map(torch.equal, results[0], results[2]))
    print(f"  {name}: errors of results and gradients {errors}; second run has the same bits: {same}", flush=True)


def _create_operations(length: int) -> dict[str, Call]:
    """Return operations' calls by name, for a row with one document."""
    first = torch.zeros(1, length, dtype=torch.int32, device="cuda")
    counts = torch.arange(1, length + 1, dtype=torch.int32, device="cuda")[None]
    index = _draw_index_inputs(length)
    inputs = _draw(1, length, HEADS, LATENT + ROPE), _draw(1, length, LATENT + ROPE)
    choice, _ = triton.choose_keys_triton(*index, first, counts, CHOSEN)
    seed, score_seed = _draw(1, length, HEADS, LATENT).detach(), torch.randn(choice.shape, device="cuda")

    def attend() -> Tensor:
        return triton.sparse_attention_triton(*inputs, choice, LATENT, SCALE)[0]

    def choose() -> Tensor:
        return triton.choose_keys_triton(*index, first, counts, CHOSEN)[1]

    return {
        CHOICE: torch.no_grad()(choose),
        CHOICE_BOTH: lambda: torch.autograd.grad(choose(), index, score_seed),
        FORWARDS: torch.no_grad()(attend),
        BOTH: lambda: torch.autograd.grad(attend(), inputs, seed),
    }


def _show_operations(length: int) -> None:
    calls = _create_operations(length)
    for name, call in calls.items():
        _show(name, call)
    for name in (CHOICE_BOTH, BOTH):
        print(f"   {name}", flush=True)
        show_kernels(calls[name], 10)


def _build_attention(kind: Any, **sizes: Any) -> Any:
    """Return a layer's attention, with random weights."""
    model = kind(
        kernels=kernels_on(torch.device("cuda")),
        num_hidden_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=ROPE,
        qk_nope_head_dim=NOPE,
        v_head_dim=NOPE,
        kv_lora_rank=LATENT,
        q_lora_rank=QUERY_RANK,
        first_k_dense_replace=0,
        num_experts=16,
        num_experts_per_tok=8,
        moe_intermediate_size=256,
        intermediate_size=256,
        vocab_size=128,
        **sizes,
    )
    with torch.device("cuda"):
        attention = model.build(LayerRange(0, 1, embedding=False, head=False)).model.layers["0"].self_attn.bfloat16()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    return attention


def _show_layers(length: int) -> None:
    """Print attention's times in whole layers: from projected queries and latents to values by head."""
    indexer = {"index_topk": CHOSEN, "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_WIDTH}
    layers = {
        "dense layer": _build_attention(DeepseekV3),
        "sparse layer, frozen indexer": _build_attention(DeepseekV32, **indexer, indexer_loss_coef=0.0),
        "sparse layer": _build_attention(DeepseekV32, **indexer),
    }
    widths = (HEADS, NOPE), (HEADS, ROPE), (LATENT,), (1, ROPE)
    inputs = LatentInputs(*(_draw(1, length, *width) for width in widths))
    hidden, query_latent = _draw(1, length, HIDDEN).detach(), _draw(1, length, QUERY_RANK).detach()
    documents = torch.zeros(1, length, dtype=torch.int64, device="cuda")
    cos, sin = torch.rand(2, 1, length, ROPE // 2, device="cuda")
    context = LayerContext(documents, (cos, sin), None, torch.ones(1, length, device="cuda"))
    seed = _draw(1, length, HEADS, NOPE).detach()
    for name, layer in layers.items():
        mask = layer.kernels.attention_mask(documents, one_document_per_row=True)

        def attend(layer: Any = layer, mask: Any = mask) -> Tensor:
            result: Tensor = layer.attend(inputs, hidden, query_latent, context._replace(mask=mask))
            return result

        def learn(layer: Any = layer, attend: Callable[[], Tensor] = attend) -> None:
            attend().backward(seed)  # type: ignore[no-untyped-call]
            for x in (*inputs, *layer.parameters()):
                x.grad = None

        if name == "dense layer":
            q = torch.cat(inputs[:2], -1)
            print(f"  dense by {choose_one_document_implementation(q, q, q[..., :NOPE])}", flush=True)
        _try(name, partial(_show, f"{name}, forwards", torch.no_grad()(attend)))
        _try(name, partial(_show, f"{name}, both", learn))


if __name__ == "__main__":
    main()
