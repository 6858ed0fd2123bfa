"""
Tokenizing and loading beside other libraries, in one run: `make bench ONLY=data_others PEERS=/path`.

PEERS is a folder with an environment for each of datatrove, litdata, streaming (mosaicml-streaming) and megatron
(megatron-core): PEERS/litdata/bin/python. What is missing is skipped in words. MEGABYTES of text (64) are Python's
standard library, again and again; its tokens have a byte-level BPE of 32,000. All ways have one process and one thread
to encode in; tokens per second are of CPU time over all processes, memory is what these hold together (PSS).
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

from drawloom.components.data.standard_library import source_files
from drawloom.components.data.store.store import Store

PEERS = Path(os.environ.get("PEERS", "/nowhere"))
MEGABYTES = float(os.environ.get("MEGABYTES", "64"))
END = "<|end|>"
SCRIPTS = Path(__file__).parent / "data_peers"
SINGLE = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@attrs.frozen
class Measured:
    """What a command printed last, its seconds of CPU time with all children, and the most memory in MB."""

    printed: str
    seconds: float
    megabytes: float


def main() -> None:
    """Print both tables."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        corpus, tokenizer = write_corpus(folder), train_tokenizer(folder)
        tokenizing(corpus, tokenizer, folder)
        loading(folder)


def write_corpus(folder: Path) -> Path:
    """A JSONL file of MEGABYTES."""
    texts = [Path(file.path).read_text("utf-8", "replace") for file in source_files()]
    path, size = folder / "corpus" / "texts.jsonl", 0
    path.parent.mkdir()
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(cycle(texts)):
            size += file.write(json.dumps({"text": f"{number} {text}"}, ensure_ascii=False) + "\n")
            if size > MEGABYTES * 1e6:
                return path
    raise AssertionError


def train_tokenizer(folder: Path) -> Path:
    """A byte-level BPE, as GPT-2's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator((Path(file.path).read_text("utf-8", "replace") for file in source_files()), trainer)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def tokenizing(corpus: Path, tokenizer: Path, folder: Path) -> None:
    """Print tokens per second and memory of each way."""
    print(f"tokenizing {corpus.stat().st_size / 1e6:.0f} MB     tokens       M tokens/s a core  peak MB")
    own = ["-m", "drawloom", "tokenize", str(corpus), "--to", str(folder / "store"), "--tokenizer", str(tokenizer)]
    found = run(sys.executable, [*own, "--end-token", END, "--workers", "1"])
    line("drawloom tokenize", Store.open(folder / "store").token_count, found)
    for way in ("tokenizers", "datasets", "datatrove", "megatron"):
        if (python := interpreter(way)) is not None:
            (folder / way).mkdir()
            with reported(way):
                script = [str(SCRIPTS / "tokenizing.py"), way, str(corpus), str(tokenizer), str(folder / way)]
                found = run(python, script)
                line(way, int(found.printed.split()[-1]), found)


def line(way: str, tokens: int, found: Measured) -> None:
    """Print a line of the first table."""
    print(f"{way:<20} {tokens:>12,}  {tokens / found.seconds / 1e6:>17.2f}  {found.megabytes:>7.0f}", flush=True)


def loading(folder: Path) -> None:
    """Print rows per second of each loader."""
    tokens = folder / "store" / "00000.tokens"
    print(f"\nloading, of {tokens.stat().st_size / 2e6:.0f} M tokens   rows/s: no worker   one worker")
    for way in ("drawloom", "torch", "litdata", "streaming"):
        if (python := interpreter(way)) is not None:
            script = [str(SCRIPTS / "loading.py"), way, str(tokens), str(folder / f"{way}-rows")]
            with reported(way):
                rates = [float(run(python, [*script, str(workers)]).printed.split()[-1]) for workers in (0, 1)]
                print(f"{way:<30} {rates[0]:>17,.0f} {rates[1]:>12,.0f}", flush=True)


def interpreter(way: str) -> str | None:
    """The Python of a library's environment; None, with a word of it, if there is none."""
    if way in ("drawloom", "tokenizers", "datasets", "torch"):
        return sys.executable
    if (path := PEERS / way / "bin" / "python").exists():
        return str(path)
    print(f"{way:<20} skipped: there is no {path}")
    return None


@contextmanager
def reported(way: str) -> Iterator[None]:
    """Print why a way failed, such as a package that its environment lacks, and go on with the next."""
    try:
        yield
    except RuntimeError as error:
        print(f"{way:<20} failed: {str(error).splitlines()[-1]}", flush=True)


def run(python: str, arguments: Sequence[str]) -> Measured:
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
    return Measured(out.strip(), cpu_seconds() - before, most[0] / 1e3)


def cpu_seconds() -> float:
    """CPU time of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def watch_memory(process: "subprocess.Popen[str]", most: list[float]) -> None:
    """Keep the most kB that a process and its descendants have held together."""
    while process.poll() is None:
        most[0] = max(most[0], sum(map(proportional, descendants(process.pid))))
        time.sleep(0.1)


def descendants(process: int) -> Iterator[int]:
    """A process, its children, and theirs."""
    yield process
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it may have ended
            for child in task.read_text().split():
                yield from descendants(int(child))


def proportional(process: int) -> int:
    """The kB of a process, of which shared ones are divided among those that share them; 0 if it has ended."""
    with suppress(OSError):
        for each in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if each.startswith("Pss:"):
                return int(each.split()[1])
    return 0
