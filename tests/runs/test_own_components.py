"""Runs with components of a user's package, which only --import makes available."""

from pathlib import Path

import pytest

from support import runs
from support.runs import Outcome, write_corpus

METRIC = '''"""A metric of one's own."""

from drawloom.components.ports.run import Step
from drawloom.graph import component


@component(impact="safe")
class Index:
    """The number of the step."""

    @property
    def accumulators(self):
        return {}

    def measure_on_rank(self, step: Step):
        return {}

    def compute(self, totals, step: Step):
        return {"index": step.index}
'''
TOKENIZER = '''"""A tokenizer of one's own."""

from pathlib import Path

from drawloom.components.data.bytes import Bytes
from drawloom.graph import component


@component
class OwnBytes:
    """Bytes as tokens."""

    vocab_size = property(lambda self: 257)
    eos_id = property(lambda self: 256)
    prefix_ids = suffix_ids = ()

    def encode(self, text: str):
        return Bytes().encode(text)

    def encode_batch(self, texts):
        return Bytes().encode_batch(texts)

    def decode(self, ids):
        return Bytes().decode(ids)

    def token_byte_counts(self):
        return Bytes().token_byte_counts()

    def save(self, folder: Path) -> None:
        Bytes().save(folder)
'''
IMPORT = ("--import", "my_lab")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a corpus, the tiny recipe, and a package with a metric and a tokenizer."""
    write_corpus(tmp_path)
    package = tmp_path / "lib" / "my_lab"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", "index": METRIC, "own_bytes": TOKENIZER}.items():
        (package / f"{name}.py").write_text(text, "utf-8")
    return tmp_path


def drawloom(folder: Path, *arguments: str) -> Outcome:
    """Run a command in a process that can import the package."""
    return runs.drawloom(folder, *arguments, path=str(folder / "lib"))[0]


def test_generate_and_export_need_no_components_that_they_do_not_use(folder: Path) -> None:
    """A run with a metric of a user's package is sampled and exported without this package."""
    done = drawloom(folder, "run", "tiny.toml", *IMPORT, "metrics.own.use=my_lab.index", "trainer.steps=2")
    assert done.code == 0, done.text
    generated = drawloom(folder, "generate", "runs/tiny", "--prompt", "def ", "--tokens", "4")
    assert generated.code == 0 and generated.text.startswith("def "), generated.text
    exported = drawloom(folder, "export", "runs/tiny", "--to", "whole")
    assert exported.code == 0 and (folder / "whole/config.json").exists(), exported.text


@pytest.mark.soak
def test_every_command_accepts_a_package_of_own_components(folder: Path) -> None:
    """A command that needs the package asks for --import, and works with it."""
    own = ("tokenizer.use=my_lab.own_bytes",)
    assert drawloom(folder, "run", "tiny.toml", *IMPORT, *own, "trainer.steps=2").code == 0
    refused = drawloom(folder, "generate", "runs/tiny", "--prompt", "def ")
    assert refused.code == 2 and "no component is called 'my_lab.own_bytes'" in refused.text
    assert "add --import my_lab" in refused.text and "Traceback" not in refused.text
    for command in (
        ("generate", "runs/tiny", "--prompt", "def ", "--tokens", "4"),
        ("export", "runs/tiny", "--to", "whole"),
        ("verify", "runs/tiny"),
        ("schedule", "tiny.toml", *own),
        ("verify-resume", "tiny.toml", *own, "--steps", "80"),
    ):
        outcome = drawloom(folder, *command, *IMPORT)
        assert outcome.code == 0, outcome.text
