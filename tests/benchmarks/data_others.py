"""
Tokenizing and data loading compared with other libraries, in one run: `make bench NAME=data_others PEERS=/path`.

PEERS is a folder with an environment for each of datatrove, litdata, streaming (mosaicml-streaming) and megatron
(megatron-core): PEERS/litdata/bin/python. A missing library is reported and skipped. The text repeats Python's standard
library up to MEGABYTES (64); the tokenizer is a byte-level BPE with 32,000 tokens. Every library encodes in one process
and one thread. Tokens per second divide by the CPU time of all processes; memory is their summed PSS.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path

import attrs
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from drawloom.components.data.standard_library import list_source_files
from drawloom.components.data.store.store import Store

PEERS = Path(os.environ.get("PEERS", "/nowhere"))
MEGABYTES = float(os.environ.get("MEGABYTES", "64"))
END = "<|end|>"
SCRIPTS = Path(__file__).parent / "data_peers"
SINGLE = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@attrs.frozen
class CommandUsage:
    """Output of a command, its CPU seconds with all children, and its peak memory in MB."""

    printed: str
    seconds: float
    megabytes: float


def main() -> None:
    """Print both tables."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus, tokenizer = write_corpus(folder), train_tokenizer(folder)
        print_tokenizing(corpus, tokenizer, folder)
        print_loading(folder)


def write_corpus(folder: Path) -> Path:
    """Write a JSONL file of MEGABYTES, and return its path."""
    texts = [Path(file.path).read_text("utf-8", "replace") for file in list_source_files()]
    path, size = folder / "corpus" / "texts.jsonl", 0
    path.parent.mkdir()
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(cycle(texts)):
            size += file.write(json.dumps({"text": f"{number} {text}"}, ensure_ascii=False) + "\n")
            if size > MEGABYTES * 1e6:
                return path
    raise AssertionError


def train_tokenizer(folder: Path) -> Path:
    """Train a byte-level BPE like GPT-2's, and return its file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(
        (Path(file.path).read_text("utf-8", "replace") for file in list_source_files()), trainer
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def print_tokenizing(corpus: Path, tokenizer: Path, folder: Path) -> None:
    """Print every library's tokens per second and memory."""
    print(f"tokenizing {corpus.stat().st_size / 1e6:.0f} MB     tokens       M tokens/s a core  peak MB")
    own = ["-m", "drawloom", "tokenize", str(corpus), "--to", str(folder / "store"), "--tokenizer", str(tokenizer)]
    usage = run(sys.executable, [*own, "--end-token", END, "--workers", "1"])
    line("drawloom tokenize", Store.open(folder / "store").token_count, usage)
    for way in ("tokenizers", "datasets", "datatrove", "megatron"):
        if (python := interpreter(way)) is not None:
            (folder / way).mkdir()
            with report_failure(way):
                script = [str(SCRIPTS / "tokenizing.py"), way, str(corpus), str(tokenizer), str(folder / way)]
                usage = run(python, script)
                line(way, int(usage.printed.split()[-1]), usage)


def line(way: str, tokens: int, usage: CommandUsage) -> None:
    """Print a line of the first table."""
    print(f"{way:<20} {tokens:>12,}  {tokens / usage.seconds / 1e6:>17.2f}  {usage.megabytes:>7.0f}", flush=True)


def print_loading(folder: Path) -> None:
    """Print every loader's rows per second."""
    tokens = folder / "store" / "00000.tokens"
    print(f"\nloading, of {tokens.stat().st_size / 2e6:.0f} M tokens   rows/s: no worker   one worker")
    for way in ("drawloom", "torch", "litdata", "streaming"):
        if (python := interpreter(way)) is not None:
            script = [str(SCRIPTS / "loading.py"), way, str(tokens), str(folder / f"{way}-rows")]
            with report_failure(way):
                rates = [float(run(python, [*script, str(workers)]).printed.split()[-1]) for workers in (0, 1)]
                print(f"{way:<30} {rates[0]:>17,.0f} {rates[1]:>12,.0f}", flush=True)


def interpreter(way: str) -> str | None:
    """Return the Python of a library's environment, or print that it is missing and return None."""
    if way in ("drawloom", "tokenizers", "datasets", "torch"):
        return sys.executable
    if (path := PEERS / way / "bin" / "python").exists():
        return str(path)
    print(f"{way:<20} skipped: there is no {path}")
    return None


@contextmanager
def report_failure(way: str) -> Iterator[None]:
    """Print why a library failed, such as a missing package, instead of raising."""
    try:
        yield
    except RuntimeError as error:
        print(f"{way:<20} failed: {str(error).splitlines()[-1]}", flush=True)


def run(python: str, arguments: Sequence[str]) -> CommandUsage:
    """Run a script to its end, alone."""
    before = cpu_seconds()
    process = subprocess.Popen(
        [python, *arguments], env={**os.environ, **SINGLE}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    most = [0.0]
    watch = threading.Thread(target=watch_memory, args=(process, most))
    watch.start()
    out, errors = process.communicate()
    watch.join()
    if process.returncode:
        raise RuntimeError(f"{arguments}: {errors[-2000:]}")
    return CommandUsage(out.strip(), cpu_seconds() - before, most[0] / 1e3)


def cpu_seconds() -> float:
    """Return the CPU time of all ended child processes and their descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def watch_memory(process: "subprocess.Popen[str]", most: list[float]) -> None:
    """Record the peak kB of a process and its descendants until it ends."""
    while process.poll() is None:
        most[0] = max(most[0], sum(map(proportional_size, descendants(process.pid))))
        time.sleep(0.1)


def descendants(process: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield process
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it may have ended
            for child in task.read_text().split():
                yield from descendants(int(child))


def proportional_size(process: int) -> int:
    """Return a process's proportional set size (PSS) in kB, or 0 if the process has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0
