"""
torchtitan 0.2.2's own Trainer on random tokens, for `several.py`; start it with torchrun.

Packages that only load data, or parse the command line, are replaced, so that torchtitan alone must be installed. Each
rank draws its own rows. Rank 0 writes the seconds between steps, by CUDA events, and its peak memory to a file,
and with TRACED=3 its operations on the GPU in the last three steps.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.breakdown import describe_operations
from benchmarks.gpu.timeline import iterate_gpu_operations
from benchmarks.gpu.titan import AbsentModule

SKIPPED = (
    "tyro",
    "torchdata",
    "torchdata.stateful_dataloader",
    "datasets",
    "datasets.distributed",
    "torchtitan.config.manager",
)


class RandomBatches:
    """A rank's batches without an end: inputs and labels (rows, length), int64."""

    def __init__(self, rows: int, length: int, vocab_size: int, seed: int) -> None:
        self.size, self.vocab_size = (rows, length + 1), vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            ids = torch.randint(self.vocab_size, self.size, generator=self.generator)
            yield {"input": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: no run is resumed."""


def main() -> None:
    """Train as the JSON in the first argument says, and write results to the file in the second."""
    job, target = json.loads(sys.argv[1]), Path(sys.argv[2])
    _share_gpus()
    for name in SKIPPED:
        sys.modules.setdefault(name, AbsentModule(name))
    trainer_module = import_module("torchtitan.train")
    specs: Any = import_module("torchtitan.protocols.train_spec")
    spec = specs.get_train_spec(job["model"]["name"])
    arguments = dataclasses.replace(spec.model_args[job["model"]["flavor"]], **job.pop("arguments"))

    def make_batches(dp_world_size: int, dp_rank: int, tokenizer: None, job_config: Any) -> RandomBatches:
        training = job_config.training
        return RandomBatches(training.local_batch_size, training.seq_len, arguments.vocab_size, dp_rank)

    random_spec = dataclasses.replace(
        spec,
        model_args={job["model"]["flavor"]: arguments},
        build_tokenizer_fn=None,
        build_dataloader_fn=make_batches,
        build_validator_fn=None,
    )
    specs.get_train_spec = lambda name: random_spec
    config = import_module("torchtitan.config").JobConfig()
    for table, values in job.items():
        for key, value in values.items():
            setattr(getattr(config, table), key, value)
    events: list[Any] = []
    peaks = [0]  # its metrics reset torch's peak
    traced = int(os.environ.get("TRACED", "0"))
    """The number of last steps whose operations on the GPU are listed."""
    tracer = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)

    class TimedTrainer(trainer_module.Trainer):  # type: ignore[misc, name-defined]
        def train_step(self, batches: Any) -> None:
            if len(events) == config.training.steps - traced:
                tracer.start()
            events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            events[-1].record()
            super().train_step(batches)
            peaks.append(torch.cuda.max_memory_allocated())

    trainer = TimedTrainer(config)
    trainer.train()
    torch.cuda.synchronize()
    if traced:
        tracer.stop()
    if torch.distributed.get_rank() == 0:
        seconds = [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
        operations = ["", *describe_operations(list(iterate_gpu_operations(tracer)))] if traced else []
        result = {"seconds": seconds, "bytes": max(peaks), "operations": "\n        ".join(operations)}
        target.write_text(json.dumps(result))
    trainer.close()
    torch.distributed.destroy_process_group()


def _share_gpus() -> None:
    """Let several ranks use one GPU if there are too few, as `device.share` does."""
    rank, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if count < int(os.environ["LOCAL_WORLD_SIZE"]):
        os.environ["NCCL_HOSTID"] = f"rank {rank}"
        os.environ["LOCAL_RANK"] = str(rank % count)


if __name__ == "__main__":
    main()
