"""
The run of `docs/runs/python_source` from its data to its page: `make bench NAME=published_run`.

A corpus of installed packages' source, a tokenizer, a token store, training, evaluation and samples; the page, the
curves and the list of packages are written into the folder. Words of the command line are options of this
program, or values of the recipe; a trial on a CPU:

    make bench NAME=published_run ONLY="--to /tmp/page --packages stdlib --vocabulary 2000 --held-out tqdm \
        precision.compute=float32 precision.uncast=[] vars.length=128 trainer.steps=20 model.num_hidden_layers=2"
"""

import argparse
import json
import lzma
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

from drawloom.components.commands._plots import Panel, draw_svg_panels
from drawloom.components.data.standard_library import list_source_files

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "runs" / "python_source"
END = "<|end|>"
MIN_BYTES, MAX_BYTES = 200, 500_000
"""Sizes of the files in the corpus: larger ones are mostly tables."""
TOKENIZER_BYTES = 100_000_000
"""Bytes of text that the tokenizer is trained on."""
PROMPTS = ("def binary_search(values, target):\n", "class Stack:\n", "import argparse\n", '"""Read a CSV file')
MAX_POINTS = 300
"""Points of a curve in the picture."""


def main() -> None:
    """Make the run, and write its page."""
    parser = argparse.ArgumentParser(description="make the published run")
    parser.add_argument("--to", type=Path, default=PAGE, help="folder of the page")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "published", help="folder of the corpus and run")
    parser.add_argument("--packages", nargs="+", default=[], help="packages of the corpus (default: all)")
    parser.add_argument("--held-out", default="networkx", help="a package whose files are only evaluated")
    parser.add_argument("--vocabulary", type=int, default=16_384, help="tokens of the tokenizer")
    parser.add_argument("--price", type=float, default=3.0, help="dollars for an hour of the machine")
    options, words = parser.parse_known_args()
    options.work.mkdir(parents=True, exist_ok=True)
    options.to.mkdir(parents=True, exist_ok=True)
    for name in ("store", "runs"):
        shutil.rmtree(options.work / name, ignore_errors=True)
    clock = Clock()
    sizes = write_corpus(options.work / "corpus.jsonl", options.packages, options.held_out)
    clock.end("corpus")
    train_tokenizer(options.work, options.vocabulary)
    clock.end("tokenizer")
    store = ["corpus.jsonl", "--to", "store", "--tokenizer", "tokenizer.json", "--end-token", END]
    drawloom(options.work, "tokenize", *store)
    clock.end("token store")
    if options.to != PAGE:
        shutil.copy(PAGE / "recipe.toml", options.to)
    log = drawloom(options.work, "run", str(options.to / "recipe.toml"), *words)
    clock.end("training, with evaluations, checkpoints and the export")
    run = "runs/python_source"
    validation = json.loads(drawloom(options.work, "evaluate", run, "--format", "json"))
    files = [str(file) for file in list_package_files(options.held_out)]
    held_out = json.loads(drawloom(options.work, "evaluate", run, "--format", "json", "--corpus", *files))
    clock.end("evaluation")
    sampling = ("--tokens", "120", "--temperature", "0.6", "--top-k", "50")
    samples = [drawloom(options.work, "generate", run, "--prompt", prompt, *sampling) for prompt in PROMPTS]
    clock.end("samples")
    (options.to / "curves.svg").write_text(draw_curves(options.work / run / "metrics.jsonl"), "utf-8")
    (options.to / "packages.json").write_text(json.dumps(sizes, indent=0) + "\n", "utf-8")
    table = {
        f"validation files ({validation['weight']:,.0f} tokens)": validation,
        f"all files of `{options.held_out}` ({held_out['weight']:,.0f} tokens)": held_out,
    }
    packed = compute_xz_bits_per_byte(map(Path, files))
    page = write_page(sizes, log, words, clock.seconds, table, packed, samples, options.held_out, options.price)
    (options.to / "index.md").write_text(page, "utf-8")
    print(f"page in {options.to}; {sum(clock.seconds.values()):.0f} seconds", flush=True)


class Clock:
    """Seconds of a program's parts, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def end(self, part: str) -> None:
        """End a part and begin the next."""
        now = time.monotonic()
        self.seconds[part], self._began = now - self._began, now
        print(f"-- {part}: {self.seconds[part]:.1f} s", flush=True)


def drawloom(folder: Path, *words: str) -> str:
    """Run a command in a folder, print its output as it comes, and return it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-m", "drawloom", *words]
    lines = []
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(line[:300], end="", flush=True)
    if process.returncode:
        sys.exit(f"{' '.join(words[:2])} ended with {process.returncode}")
    return "".join(lines)


def list_package_files(package: str) -> Iterator[Path]:
    """Yield an installed package's modules, sorted."""
    for folder in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        yield from sorted(Path(folder, package).rglob("*.py"))


def write_corpus(target: Path, packages: Sequence[str], held_out: str) -> dict[str, int]:
    """Write a JSON line per different file, and return the bytes by package and version."""
    names = packages if packages else sorted({*packages_distributions(), "stdlib"})
    library = [Path(file.path) for file in list_source_files()]
    sizes, seen = Counter[str](), set[bytes]()
    with target.open("w", encoding="utf-8") as file:
        for name in names:
            if name == held_out:
                continue
            for path in library if name == "stdlib" else list_package_files(name):
                content = path.read_bytes() if MIN_BYTES <= path.stat().st_size <= MAX_BYTES else b""
                digest = blake2b(content).digest()
                try:
                    text = content.decode("utf-8")
                except UnicodeDecodeError:
                    continue
                if text and digest not in seen:
                    seen.add(digest)
                    sizes[name] += len(content)
                    file.write(json.dumps({"text": text}) + "\n")
    print(f"{len(seen):,} files of {len(sizes)} packages, {sum(sizes.values()):,} bytes", flush=True)
    return {f"{name} {get_version(name)}": size for name, size in sizes.most_common()}


def get_version(package: str) -> str:
    """Return the version of a package's distribution."""
    if package == "stdlib":
        return platform.python_version()
    return version(packages_distributions()[package][0])


def train_tokenizer(folder: Path, vocabulary: int) -> None:
    """Train a byte-level BPE tokenizer on the corpus's lines, spread over the corpus."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    every = max(1, round((folder / "corpus.jsonl").stat().st_size / TOKENIZER_BYTES))
    tokenizer = Tokenizer(models.BPE())
    # Runs of spaces are tokens: they are a tenth of Python's text.
    words = Regex(r"\n[ ]*| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
    split = pre_tokenizers.Split(words, behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    with (folder / "corpus.jsonl").open(encoding="utf-8") as file:
        tokenizer.train_from_iterator(
            (json.loads(line)["text"] for n, line in enumerate(file) if n % every == 0), trainer
        )
    tokenizer.save(str(folder / "tokenizer.json"))


def draw_curves(path: Path) -> str:
    """Return the losses and the speed of a run's steps as SVG."""
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]

    def take(key: str) -> list[tuple[float, float]]:
        points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
        return points[:: -(-len(points) // MAX_POINTS) or 1]

    losses = Panel(
        "loss per token",
        "step",
        {"training": take("loss"), "validation": take("validation_loss")},
        is_logarithmic=False,
    )
    speed = Panel("tokens per second", "step", {"": take("tokens_per_second")[1:]}, is_logarithmic=False)
    return draw_svg_panels("python_source", [losses, speed]) + "\n"


def compute_xz_bits_per_byte(files: Iterator[Path]) -> float:
    """Return the bits per byte of all files compressed as one by xz."""
    text = b"".join(file.read_bytes() for file in files)
    return 8 * len(lzma.compress(text, preset=9)) / len(text)


def write_page(
    sizes: Mapping[str, int],
    log: str,
    words: Sequence[str],
    seconds: Mapping[str, float],
    table: Mapping[str, Mapping[str, Any]],
    packed: float,
    samples: Sequence[str],
    held_out: str,
    price: float,
) -> str:
    """Return the page in Markdown."""
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU with {os.cpu_count()} cores"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    total = sum(seconds.values())
    changed = f" with `{' '.join(words)}`" if words else ""
    top = ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in list(sizes.items())[:8])
    count = f"{len(sizes)} installed packages" if len(sizes) > 1 else "one package"
    rows = [
        f"| {name} | {r['loss']:.4f} | {r['perplexity']:.3g} | {r['bits_per_byte']:.4f} |" for name, r in table.items()
    ]
    times = [f"| {part} | {value:,.0f} |" for part, value in seconds.items()]
    header, summary = split_log(log)
    parts = [
        "# A run from data to evaluation",
        f"One command trains a model from random weights to the end, on {machine} ({versions}), and writes this page:",
        "<!-- not run: it takes minutes on a GPU -->\n```console\n$ make bench NAME=published_run\n```",
        f"The [recipe](recipe.toml){changed}, in full: `drawloom show recipe.toml`.",
        "## Data",
        f"The Python source of {count}, {sum(sizes.values()) / 1e6:.1f} MB in files that differ. The largest:"
        f" {top}; [all, with versions](packages.json). The tokenizer is a byte-level BPE, trained on the same files. A"
        " hash of a file's tokens decides whether it is for validation. Packages repeat code, as transformers does"
        f" between models, so validation files are easier than code from elsewhere; no file of `{held_out}` is in the"
        " corpus.",
        "## Training",
        f"```text\n{header}\n```",
        "![Losses and tokens per second over steps](curves.svg)",
        f"```text\n{summary}\n```",
        "## Evaluation",
        "| files | loss per token | perplexity | bits per byte |\n|-|-|-|-|\n" + "\n".join(rows),
        f"`xz -9` needs {packed:.3f} bits per byte for `{held_out}` as one file.",
        "Samples at temperature 0.6 from the 50 likeliest tokens, as they came:",
        *(f"```text\n{strip_lines(sample)}\n```" for sample in samples),
        "## Cost",
        "| part | seconds |\n|-|-|\n" + "\n".join(times),
        f"{total / 60:.1f} minutes of the machine in all: {total / 3600 * price:.2f} dollars, at {price:.2f} an hour.",
    ]
    return "\n\n".join(parts) + "\n"


def split_log(log: str) -> tuple[str, str]:
    """Return the lines before a run's first step, and after its last."""
    lines = log.splitlines()
    steps = [number for number, line in enumerate(lines) if line.startswith("step ")]
    return strip_lines("\n".join(lines[: steps[0]])), strip_lines("\n".join(lines[steps[-1] + 1 :]))


def strip_lines(text: str) -> str:
    """Return a text without spaces at its lines' ends."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


if __name__ == "__main__":
    main()
