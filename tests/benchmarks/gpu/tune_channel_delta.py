"""Times of the kernels for decays by channel by launch options: `make bench NAME=tune_channel_delta`."""

import multiprocessing

import torch

from benchmarks.gpu.clock import cost
from drawloom.kernels.channel_delta import triton as rule
from drawloom.kernels.documents import number_recurrent_documents
from drawloom.kernels.triton.chunks import ChunkSizes

ROWS, LENGTH, HEADS, WIDTH = 8, 4096, 32, 128
OPTIONS: dict[str, list[dict[str, int]]] = {
    "solve": [
        {"num_warps": 4},
        {"num_warps": 8},
        {"num_warps": 4, "maxnreg": 168},
        {"num_warps": 8, "maxnreg": 128},
    ],
    "grad": [
        {"num_warps": 8},
        {"num_warps": 8, "maxnreg": 128},
        {"num_warps": 4},
        {"num_warps": 4, "maxnreg": 168},
    ],
    "decay": [
        {"num_warps": 4},
        {"num_warps": 4, "maxnreg": 128},
        {"num_warps": 4, "maxnreg": 96},
        {"num_warps": 8, "maxnreg": 64},
    ],
}


def main() -> None:
    """Measure every kernel in a process of its own, so that an error spoils no others."""
    spawned = multiprocessing.get_context("spawn")
    for name in OPTIONS:
        process = spawned.Process(target=measure, args=(name,))
        process.start()
        process.join()


def measure(name: str) -> None:
    """Print a line per variant."""
    torch.manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(ROWS, LENGTH, HEADS, *sizes, device="cuda", dtype=torch.bfloat16)

    q, k = (torch.nn.functional.normalize(draw(WIDTH), dim=-1) for _ in range(2))
    v, g, beta = draw(WIDTH), -draw(WIDTH).float().abs(), draw().sigmoid()
    ids, before = number_recurrent_documents(torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="cuda"))
    sizes = ChunkSizes.from_keys_and_values(k, v)
    ends = sizes.length, sizes.chunks
    decayed = rule.DecayedKeys.compute(q, k, g, ids, before, sizes)
    scores, inverse, keys, written = draw(64), draw(64), draw(WIDTH), draw(WIDTH)
    states = torch.randn(ROWS, sizes.chunks, HEADS, WIDTH, WIDTH, device="cuda").bfloat16()
    factors = torch.empty(ROWS, LENGTH, 4, HEADS, device="cuda")
    outputs = draw(WIDTH), draw(WIDTH), torch.empty_like(g), factors
    calls = {
        "decay": (rule._decay_queries_and_keys, (q, k, g, ids, before, *decayed, *ends), ("HEADS", "GROUPS", "K")),
        "solve": (
            rule._solve_chunk_systems,
            (q, k, v, beta, ids, before, decayed.k, decayed.sums, scores, inverse, keys, written, *ends),
            tuple(sizes.constants),
        ),
        "grad": (
            rule._compute_gradients,
            (v, q, k, beta, written, states, v, states, scores, inverse, decayed.sums, ids, before, *outputs, *ends),
            tuple(sizes.constants),
        ),
    }
    kernel, arguments, constants = calls[name]
    for options in OPTIONS[name]:
        chosen = {"BK": 64} | {key: sizes.constants[key] for key in constants if key != "BK"} | options
        programs = sizes.chunk_head_count * (1 if name == "solve" else WIDTH // 64)
        stages = {} if name == "decay" else {"num_stages": 1}
        try:
            spent = cost(lambda: kernel[(programs,)](*arguments, **chosen, **stages))  # noqa: B023
            print(f"{name} {options}: {spent.milliseconds:.3f} ms", flush=True)
        except Exception as error:
            print(f"{name} {options}: {type(error).__name__} {str(error)[:100]}", flush=True)


if __name__ == "__main__":
    main()
