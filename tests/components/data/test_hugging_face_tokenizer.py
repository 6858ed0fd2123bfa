"""Tokenizers from a `tokenizer.json`."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from drawloom.components.data.hugging_face_tokenizer import HuggingFaceTokenizer
from drawloom.components.ports.corpus import complete_document, complete_prompt
from drawloom.graph import UserError


def write(folder: Path) -> Path:
    """Write a word tokenizer with settings that must not affect ids: a template, truncation, padding."""
    words = {"hello": 0, "world": 1, "<": 2, "end": 3, ">": 4, "?": 5}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 6)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def open_tokenizer(path: Path, end_token: str = "<end>") -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(path=path, end_token=end_token)
    tokenizer.open()
    return tokenizer


LAYOUTS = {
    "none": None,
    "Gemma": processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
    "Llama 3": processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        ]
    ),
    "GLM-4": processors.TemplateProcessing(single="<x> <s> $A", special_tokens=[("<s>", 0), ("<x>", 2)]),
    "with an end": processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]),
    "with another end": processors.TemplateProcessing(single="$A <x>", special_tokens=[("<x>", 2)]),
    "RoBERTa": processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
    "BERT": processors.BertProcessing(("</s>", 1), ("<s>", 0)),
}
"""Post-processors by model or layout."""


def make_bpe() -> Tokenizer:
    """Return a byte-level BPE whose letters can be merged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>", "<x>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 20, trainer)
    return tokenizer


def make_unigram() -> Tokenizer:
    """Return a tokenizer in the style of SentencePiece, with a space before the first word."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "</s>", "<x>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator(["the cat sat on the mat, 12 def(x): was here"] * 20, trainer)
    return tokenizer


def write_base(folder: Path, tokenizer: Tokenizer) -> Path:
    """Write a Llama model's folder with a tokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def read_auto_ids(folder: Path, text: str) -> list[int]:
    """Return a text's ids from transformers."""
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    return ids


@pytest.mark.parametrize("make", [make_bpe, make_unigram])
@pytest.mark.parametrize("begin_token", [None, "", "<s>", "<x>"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_and_prompts_begin_like_transformers(
    layout: str, begin_token: str | None, make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """
    A document has AutoTokenizer's ids and one end token, a prompt the ids without the end; so has the export of a
    tokenizer with another begin token, and transformers agrees with it.
    """
    base, export, text = tmp_path / "base", tmp_path / "export", "the cat sat <s> on"
    base.mkdir()
    export.mkdir()
    backend = make()
    if (processor := LAYOUTS[layout]) is not None:
        backend.post_processor = processor
    tokenizer = HuggingFaceTokenizer(path=write_base(base, backend), begin_token=begin_token)
    tokenizer.open()
    (export / "config.json").write_text((base / "config.json").read_text())
    tokenizer.save(export)
    ids = tokenizer.encode(text)
    document, prompt = complete_document(tokenizer, ids).tolist(), complete_prompt(tokenizer, ids).tolist()
    expected = read_auto_ids(export, text.replace("<s>", "cat"))
    plain = complete_document(tokenizer, tokenizer.encode(text.replace("<s>", "cat"))).tolist()
    assert plain == expected + [1] * (expected[-1] != 1)
    assert document == prompt + [2] * (layout == "with another end") + [1]
    if begin_token is None:
        assert expected == read_auto_ids(base, text.replace("<s>", "cat"))
        assert (export / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    else:
        start = [] if begin_token == "" else [backend.token_to_id(begin_token)]
        assert prompt == [*start, *ids.tolist()]
    assert not caplog.records
    empty = complete_prompt(tokenizer, tokenizer.encode("")).tolist()
    assert empty == (prompt[: len(prompt) - len(ids)] or [1])


def test_a_begin_token_that_is_missing_is_refused(tmp_path: Path) -> None:
    """The message has the setting, the file and the candidates, and comes before anything is opened."""
    tokenizer = HuggingFaceTokenizer(path=write(tmp_path), end_token="<end>", begin_token="<bos>")
    with pytest.raises(UserError, match=r'begin_token: .*has no token "<bos>"; write one of "<end>"'):
        tokenizer.check_before_open()


def test_dropout_is_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """
    A file with BPE dropout gives the ids of the same file without it, in training and from the export, and one warning
    names the file.
    """
    folders = base, plain, export = [tmp_path / name for name in ("base", "plain", "export")]
    for folder in folders:
        folder.mkdir()
    write_base(plain, make_bpe())
    backend = make_bpe()
    backend.model.dropout = 0.5
    tokenizer = HuggingFaceTokenizer(path=write_base(base, backend))
    tokenizer.open()
    (export / "config.json").write_text((base / "config.json").read_text())
    tokenizer.save(export)
    (message,) = caplog.messages
    assert f"{base / 'tokenizer.json'}: BPE dropout of 0.5" in message
    text = "the cat sat on the mat " * 9
    assert tokenizer.encode(text).tolist() == read_auto_ids(plain, text) == read_auto_ids(export, text)


def test_only_the_text_is_encoded(tmp_path: Path) -> None:
    """Nothing is added, truncated or padded, whatever the file configures."""
    ids = open_tokenizer(write(tmp_path)).encode("hello world hello")
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 1, 0]


def test_text_cannot_forge_an_end(tmp_path: Path) -> None:
    """The end token's text is encoded as text."""
    tokenizer = open_tokenizer(write(tmp_path))
    ids = tokenizer.encode("hello <end> world")
    assert tokenizer.eos_id == 6
    assert 6 not in ids
    assert ids[0] == 0 and ids[-1] == 1


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    """A prompt with bytes that are not UTF-8 has such halves."""
    with pytest.raises(UserError, match="half of a surrogate pair; remove it"):
        open_tokenizer(write(tmp_path)).encode("hello \udcff")


def test_vocab_size_is_above_the_highest_id(tmp_path: Path) -> None:
    """Added tokens count, and so do gaps in the numbering."""
    path = write(tmp_path)
    assert open_tokenizer(path).vocab_size == 7
    content = json.loads(path.read_text())
    content["model"]["vocab"]["far"] = 99
    path.write_text(json.dumps(content))
    assert open_tokenizer(path).vocab_size == 100


def test_special_tokens_are_not_decoded(tmp_path: Path) -> None:
    """Decoding returns the words without special tokens."""
    assert open_tokenizer(write(tmp_path)).decode([0, 1, 6]) == "hello world"


def test_an_unknown_end_token_lists_candidates(tmp_path: Path) -> None:
    """The error lists the file's special tokens."""
    with pytest.raises(UserError, match=r'has no token "</s>"; write one of "<end>"'):
        open_tokenizer(write(tmp_path), "</s>")


def test_invalid_paths_are_refused(tmp_path: Path) -> None:
    """A missing file, and a file that is not a tokenizer, are errors naming it."""
    with pytest.raises(UserError, match="there is no file"):
        open_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match="is not a tokenizer"):
        open_tokenizer(tmp_path / "tokenizer.json")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command for installing it."""
    absent: Any = None
    monkeypatch.setitem(sys.modules, "tokenizers", absent)
    with pytest.raises(UserError, match=r"pip install 'drawloom\[tokenizers\]'"):
        open_tokenizer(write(tmp_path))


def test_saved_files_give_the_same_ids(tmp_path: Path) -> None:
    """The file and its companions are copied; a missing configuration is written."""
    source, one, two = tmp_path / "source", tmp_path / "one", tmp_path / "two"
    for folder in (source, one, two):
        folder.mkdir()
    path = write(source)
    open_tokenizer(path).save(one)
    assert (one / "tokenizer.json").read_bytes() == path.read_bytes()
    assert json.loads((one / "tokenizer_config.json").read_text())["eos_token"] == "<end>"
    (source / "tokenizer_config.json").write_text('{"mine": 1}')
    open_tokenizer(path).save(two)
    assert json.loads((two / "tokenizer_config.json").read_text()) == {"mine": 1}


@pytest.mark.parametrize("eos", ["<end>", {"content": "<end>", "special": True}])
def test_a_folder_says_its_end_token(eos: Any, tmp_path: Path) -> None:
    """A folder is read like its file, and the end token comes from tokenizer_config.json, in both of its forms."""
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    tokenizer = HuggingFaceTokenizer(path=tmp_path)
    tokenizer.open()
    assert tokenizer.eos_id == 6
    assert [path.name for path in tokenizer.list_input_files()["path"]] == ["tokenizer.json", "tokenizer_config.json"]


def test_an_end_token_that_nothing_says_is_asked_for(tmp_path: Path) -> None:
    """Without a setting and without a tokenizer_config.json the message lists the possible settings."""
    write(tmp_path)
    with pytest.raises(UserError, match=r'has no eos_token; write one of "<end>"'):
        HuggingFaceTokenizer(path=tmp_path).open()
