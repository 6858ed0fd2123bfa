"""Agreement with transformers' AutoTokenizer."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from drawloom.components.data import auto_tokenizer
from drawloom.components.data.auto_tokenizer import CODE_FILE, CONFIG
from drawloom.components.data.bytes import Bytes
from drawloom.components.data.hugging_face_tokenizer import (
    SAMPLES,
    HuggingFaceTokenizer,
    describe_difference_from_transformers_ids,
)
from drawloom.components.model.auto import FAMILIES
from drawloom.components.ports.corpus import Tokenizer as AnyTokenizer

TEXT = ["In 2024, 1234 people paid 1234 for 2024 rooms, and don't say why; é is not é"] * 9


def byte_level() -> Tokenizer:
    """
    Return a tokenizer that joins digits, unlike Qwen2's, and keeps letters and accents apart, composed in Qwen2's.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def by_words() -> Tokenizer:
    """Return a tokenizer of another algorithm."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXT, trainers.WordLevelTrainer(special_tokens=["?", "<end>"]))
    return tokenizer


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with tokenizers, by their kind."""
    folders = {}
    for kind in (byte_level, by_words):
        folder = folders[kind.__name__] = tmp_path_factory.mktemp(kind.__name__)
        kind().save(str(folder / "tokenizer.json"))
    return folders


def open_tokenizer(path: Path) -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(path=path, end_token="<end>")
    tokenizer.open()
    return tokenizer


def model_folder(path: Path, model_type: str, declared: str | None = None) -> Path:
    """Return a folder with a family's `config.json`, and perhaps with a declared tokenizer class."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    if declared is not None:
        (path / CONFIG).write_text(json.dumps({"tokenizer_class": declared, "eos_token": "<end>"}))
    return path


def read_ids(folder: Path, **arguments: Any) -> list[list[int]]:
    """Return the ids of the samples as AutoTokenizer gives them."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, **arguments)
    return [theirs.encode(text, add_special_tokens=False) for text in SAMPLES]


def own_ids(tokenizer: AnyTokenizer) -> list[list[int]]:
    return [tokenizer.encode(text).tolist() for text in SAMPLES]


@pytest.mark.parametrize("kind", ["byte_level", "by_words"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_transformers_gives_the_trained_ids_in_every_family(
    kind: str, model_type: str, sources: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """AutoTokenizer gives a trained tokenizer's ids, whether the folder's code may run or not."""
    tokenizer, folder = open_tokenizer(sources[kind]), model_folder(tmp_path, model_type)
    tokenizer.save(folder)
    assert read_ids(folder) == own_ids(tokenizer) == read_ids(folder, trust_remote_code=True)
    # transformers reads the config of Kimi K2 with DeepSeek-V3's class, and says so.
    expected = {"transformers.configuration_utils"} if model_type == "kimi_k2" else set()
    assert {record.name for record in caplog.records} == expected


@pytest.mark.parametrize("declared", ["Qwen2Tokenizer", "LlamaTokenizerFast", "TokenizersBackend", None])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral"])
def test_a_declared_class_is_replaced_if_it_gives_other_ids(
    model_type: str, declared: str | None, tmp_path: Path
) -> None:
    """A class named by the tokenizer's own configuration is replaced too, and a missing class name is added."""
    source = tmp_path / "source"
    source.mkdir()
    by_words().save(str(source / "tokenizer.json"))
    config = {"eos_token": "<end>"} | ({} if declared is None else {"tokenizer_class": declared})
    (source / CONFIG).write_text(json.dumps(config))
    tokenizer, folder = open_tokenizer(source), model_folder(tmp_path / "export", model_type)
    tokenizer.save(folder)
    assert read_ids(folder) == own_ids(tokenizer)


def test_a_declared_class_that_gives_the_same_ids_is_kept(tmp_path: Path) -> None:
    """The tokenizer of a Qwen2 model is exported as Qwen2's own."""
    source, folder = model_folder(tmp_path / "base", "qwen2", "Qwen2Tokenizer"), model_folder(tmp_path / "new", "qwen2")
    byte_level().save(str(source / "tokenizer.json"))
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(source)  # with Qwen2's normalizer and pre-tokenizer
    tokenizer = open_tokenizer(source)
    tokenizer.save(folder)
    assert json.loads((folder / CONFIG).read_text())["tokenizer_class"] == "Qwen2Tokenizer"
    assert not (folder / CODE_FILE).exists()
    assert read_ids(folder) == own_ids(tokenizer)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_bytes_are_bytes_in_every_family(model_type: str, tmp_path: Path) -> None:
    """AutoTokenizer gives the bytes of a text, and does not compose its accents first."""
    folder = model_folder(tmp_path, model_type)
    Bytes().save(folder)
    assert read_ids(folder) == own_ids(Bytes())


def test_an_export_can_be_saved_again(sources: dict[str, Path], tmp_path: Path) -> None:
    """A model trained from an export is exported with all files named in its configuration."""
    first, second = model_folder(tmp_path / "first", "qwen2"), model_folder(tmp_path / "second", "qwen2")
    open_tokenizer(sources["byte_level"]).save(first)
    tokenizer = open_tokenizer(first)
    tokenizer.save(second)
    assert read_ids(second, trust_remote_code=True) == own_ids(tokenizer)


def test_a_base_read_differently_by_transformers_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning has the class and the numbers of tokens; the tokenizer as transformers saves it needs none."""
    folder = model_folder(tmp_path / "base", "qwen2", "PreTrainedTokenizerFast")
    byte_level().save(str(folder / "tokenizer.json"))
    with caplog.at_level(logging.WARNING):
        open_tokenizer(folder)
    [record] = caplog.records
    assert "transformers reads it as Qwen2Tokenizer, which gives other ids" in record.getMessage()
    assert f'AutoTokenizer.from_pretrained("{folder}").save_pretrained("tokenizer")' in record.getMessage()
    caplog.clear()
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(folder).save_pretrained(model_folder(tmp_path / "tokenizer", "qwen2"))
    open_tokenizer(tmp_path / "tokenizer")
    assert not caplog.records


def test_disagreeing_ids_are_warned_of(
    sources: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving notices a release of transformers that rebuilds yet another family's tokenizers."""
    monkeypatch.setattr(auto_tokenizer, "REBUILT", ())
    with caplog.at_level(logging.WARNING):
        open_tokenizer(sources["byte_level"]).save(model_folder(tmp_path, "qwen2"))
    [record] = caplog.records
    assert "the tokenizer is saved, but transformers reads it as Qwen2Tokenizer" in record.getMessage()


def test_a_tokenizer_is_pinned_without_transformers(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing can be compared, a tokenizer without a family's class is still read unchanged."""
    tokenizer, folder = open_tokenizer(sources["byte_level"]), model_folder(tmp_path, "qwen2")
    with monkeypatch.context() as patch:
        absent: Any = None
        patch.setitem(sys.modules, "transformers", absent)
        assert describe_difference_from_transformers_ids(folder, tokenizer) == ""
        tokenizer.save(folder)
    assert read_ids(folder) == own_ids(tokenizer)
