"""Run folders have all files that their checkpoints need, in any directory and after a move."""

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import tokenizers
import tomli
from tokenizers import decoders, models, pre_tokenizers

from drawloom.graph.cli.main import main
from support.runs import drawloom, write_corpus

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
MODEL = """
extends = "pretrain"

[run]
name = "tiny"

[vars]
length = 32

[corpus]
use = "data.text_files"
paths = ["corpus/*.py"]

[tokenizer]
use = "data.hugging_face_tokenizer"
path = "parts/tokenizer.json"
end_token = "<end>"

[model]
use = "model.qwen3.dense"
config = "parts"

[batch]
global_size = 4
micro_size = 4

[trainer]
steps = 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a corpus, a recipe, and the tokenizer and config that the recipe names."""
    write_corpus(tmp_path)
    (tmp_path / "parts").mkdir()
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "parts/tokenizer.json"))
    (tmp_path / "parts/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "mine.toml").write_text(MODEL)
    return tmp_path


def test_a_moved_run_works_without_its_source_files(folder: Path) -> None:
    """`generate`, `export` and `verify` work from another directory after tokenizer and config were moved away."""
    [done] = drawloom(folder, "run", "mine.toml")
    assert done.code == 0, done.text
    other = folder / "elsewhere"
    other.mkdir()
    (folder / "runs/tiny").rename(other / "kept")
    (folder / "parts").rename(folder / "gone")
    for command in (
        ("generate", "kept", "--prompt", "def ", "--tokens", "4"),
        ("export", "kept", "--to", "whole"),
        ("verify", "kept"),
    ):
        [outcome] = drawloom(other, *command)
        assert outcome.code == 0, outcome.text
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (other / "whole" / name).read_bytes() == (other / "kept/export" / name).read_bytes()


TUNED = (
    "finetune_lora",
    "run.name=lora",
    "vars.base=runs/tiny/export",
    "vars.length=32",
    'corpus.paths=["corpus/*.py"]',
    "corpus.use=data.text_files",
    "device.share=true",
    "lr.phases=[{ to = 1.0 }]",
    "lr.start=1.0",
    "trainer.steps=1",
)


def run_command(*words: str) -> str:
    """Return the standard output of a command in this process."""
    with redirect_stdout(io.StringIO()) as printed:
        assert main(list(words)) == 0
    return printed.getvalue()


@pytest.mark.soak
def test_relative_paths_of_a_run_are_found_from_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Commands and a resume find the base and the data of a run's project from any folder, without a change of the recipe;
    in a copied or moved project they read its own files.
    """
    project, other = folder / "project", folder / "elsewhere"
    project.mkdir()
    other.mkdir()
    for name in ("corpus", "parts", "mine.toml"):
        (folder / name).rename(project / name)
    monkeypatch.chdir(project)
    run_command("run", "mine.toml")
    run_command("run", *TUNED)
    run = project / "runs/lora"
    evaluate = ("evaluate", str(run), "--format", "json")
    generate = ("generate", str(run), "--prompt", "def ", "--tokens", "4", "--temperature", "0")
    printed = [run_command(*evaluate), run_command(*generate)]
    monkeypatch.chdir(other)
    assert [run_command(*evaluate), run_command(*generate)] == printed
    run_command("export", str(run), "--to", "whole")
    assert (other / "whole/model.safetensors").is_file()
    run_command("run", str(run), "trainer.steps=2", "tokens.cache=cache")
    lock = tomli.loads((run / "recipe.lock.toml").read_text("utf-8"))
    assert (run / "checkpoints/step-2").is_dir()
    assert [lock["started_in"], lock["model"]["path"]] == [str(project), "runs/tiny/export"]
    assert lock["tokens"]["cache"] == str(other / "cache") and (other / "cache").is_dir()
    monkeypatch.chdir(project)
    run_command("run", *TUNED, "trainer.steps=2")

    shutil.copytree(project, folder / "copied")
    (project / "corpus").rename(project / "gone")
    monkeypatch.chdir(folder / "copied")
    run_command("evaluate", "runs/lora")
    shutil.rmtree(project)
    run_command("evaluate", "runs/lora")
