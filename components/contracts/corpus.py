"""Contracts for ports of corpora: documents of text, tokenizers, and documents of token ids."""

import tempfile
from pathlib import Path

import numpy as np

from drawloom.graph.testing import expect
from drawloom.ports import ChatPrompts, ChatTokenizer, Corpus, Split, TokenCorpus, Tokenizer


def documents_are_strings(corpus: Corpus) -> None:
    """The training split has documents, and all are strings; some may be empty."""
    documents = list(corpus.documents("train"))
    expect(documents, "the training split has no document")
    expect(
        any(documents) and all(isinstance(text, str) for text in documents), "a document is not a str, or all are empty"
    )


def reading_twice_yields_documents_in_the_same_order(one: Corpus, other: Corpus) -> None:
    """Reading a split again yields the same documents in the same order."""
    for split in ("train", "validation"):
        first = list(one.documents(split))
        expect(first == list(one.documents(split)), f"read again, {split} has other documents or another order")
        expect(
            first == list(other.documents(split)),
            f"a second corpus with the same settings has other documents in {split}, or another order",
        )


def splits_share_no_document(corpus: Corpus) -> None:
    """No text is in both splits, such as a copy of a file: its loss would measure memory."""
    training, validation = ({*corpus.documents(split)} - {""} for split in ("train", "validation"))
    shared = len(training & validation)
    expect(not shared, f"{shared} of {len(validation)} validation texts are in the training split")


TEXTS = ("", "a", "def f(x):\n\treturn x  # naïve\n", "Zwölf Boxkämpfer 😀", "one\r\ntwo\x00three", "  \n\n ")


def decoding_returns_the_text(tokenizer: Tokenizer) -> None:
    """Decoding the ids of a text returns the text."""
    for text in TEXTS:
        decoded = tokenizer.decode([int(token) for token in tokenizer.encode(text)])
        expect(decoded == text, f"{text!r} comes back as {decoded!r}")


def ids_are_below_vocab_size_and_no_text_has_eos(tokenizer: Tokenizer) -> None:
    """Ids are int32 and, like eos_id, from 0 to vocab_size - 1; no text contains eos_id."""
    expect(0 <= tokenizer.eos_id < tokenizer.vocab_size, f"eos_id = {tokenizer.eos_id} is outside of the vocabulary")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        expect(ids.dtype == np.int32 and ids.ndim == 1, f"ids are {ids.dtype} of shape {ids.shape}")
        expect(all(0 <= token < tokenizer.vocab_size for token in ids), f"{text!r} has ids outside of the vocabulary")
        expect(tokenizer.eos_id not in ids, f"{text!r} has eos_id among its ids")


def ids_have_as_many_bytes_as_the_text(tokenizer: Tokenizer) -> None:
    """A text's ids have as many bytes as the text, and eos_id has none."""
    table = tokenizer.token_byte_counts()
    expect(table.dtype == np.int64 and table.shape == (tokenizer.vocab_size,), f"{table.dtype} {table.shape} of bytes")
    expect(table[tokenizer.eos_id] == 0, f"the end of a document has {table[tokenizer.eos_id]} bytes")
    for text in TEXTS:
        counted, size = int(table[tokenizer.encode(text)].sum()), len(text.encode())
        expect(counted == size, f"{text!r} has {size} bytes, and its ids {counted}")


def two_tokenizers_return_the_same_ids(one: Tokenizer, other: Tokenizer) -> None:
    """Two tokenizers with the same settings return the same ids."""
    for text in TEXTS:
        expect(np.array_equal(one.encode(text), other.encode(text)), f"{text!r} has two encodings")


def texts_are_encoded_alike_together_or_alone(tokenizer: Tokenizer) -> None:
    """Encoding texts together or alone returns the same ids."""
    encodings = tokenizer.encode_batch(TEXTS)
    expect(len(encodings) == len(TEXTS), f"{len(TEXTS)} texts have {len(encodings)} encodings")
    for text, ids in zip(TEXTS, encodings, strict=True):
        is_same = ids.dtype == np.int32 and np.array_equal(ids, tokenizer.encode(text))
        expect(is_same, f"{text!r} has other ids in a batch")


def saving_writes_files(tokenizer: Tokenizer) -> None:
    """Saving writes at least one file into an existing folder."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        expect(any(Path(folder).iterdir()), "nothing was saved")


SPLITS: tuple[Split, ...] = ("train", "validation")


def corpus_ids_are_below_vocab_size(corpus: TokenCorpus) -> None:
    """The training split has tokens; all ids and eos_id are from 0 to vocab_size - 1."""
    expect(0 <= corpus.eos_id < corpus.vocab_size, f"eos_id = {corpus.eos_id} is outside of the vocabulary")
    documents = corpus.documents("train")
    expect(
        len(documents.lengths) > 0 and documents.lengths.min() >= 0, "there is no document, or one is shorter than 0"
    )
    for number, length in enumerate(documents.lengths[:100].tolist()):
        ids = documents.read(number, 0, length).ids
        expect(np.issubdtype(ids.dtype, np.integer) and ids.shape == (length,), f"{ids.dtype} {ids.shape} of {length}")
        expect(ids.min(initial=0) >= 0 and ids.max(initial=0) < corpus.vocab_size, f"document {number} has other ids")


def part_of_a_document_equals_its_slice(corpus: TokenCorpus) -> None:
    """Reading a part of a document returns the ids and weights of the whole; weights are finite and nonnegative."""
    for split in SPLITS:
        documents = corpus.documents(split)
        for number, length in enumerate(documents.lengths[:20].tolist()):
            first, last = length // 3, length - length // 4
            whole, part = documents.read(number, 0, length), documents.read(number, first, last)
            expect(np.array_equal(whole.ids[first:last], part.ids), f"part of document {number} differs from the whole")
            expect(whole.reference == part.reference, "a part has another reference than the whole")
            if (weights := whole.weights) is not None:
                expect(weights.dtype == np.float32 and weights.shape == (length,), f"{weights.dtype} {weights.shape}")
                expect(bool(np.isfinite(weights).all() and (weights >= 0).all()), "a weight is negative or infinite")
                partial = part.weights
                expect(partial is not None and np.array_equal(weights[first:last], partial), "weights of a part differ")


def equal_settings_yield_equal_documents_and_fingerprints(one: TokenCorpus, other: TokenCorpus) -> None:
    """Two corpora with the same settings have the same documents and equal fingerprints."""
    for split in SPLITS:
        first, second = one.documents(split), other.documents(split)
        expect(np.array_equal(first.lengths, second.lengths), f"{split} has documents of other lengths the second time")
        expect(first.fingerprint == second.fingerprint, f"{split} has another fingerprint the second time")
        for number, length in enumerate(first.lengths[:20].tolist()):
            is_same = np.array_equal(first.read(number, 0, length).ids, second.read(number, 0, length).ids)
            expect(is_same, f"document {number} of {split} differs the second time")


def every_document_has_a_unique_origin(corpus: TokenCorpus) -> None:
    """Every document has a source, and sources differ."""
    documents = corpus.documents("train")
    sources = [documents.describe_origin(number) for number in range(min(20, len(documents.lengths)))]
    expect(all(sources) and len(set(sources)) == len(sources), f"sources are missing or equal: {sources}")


def only_templates_encode_control_tokens(tokenizer: ChatTokenizer) -> None:
    """A template encodes a control token as one id, and no text can produce that id."""
    for token in tokenizer.control_tokens:
        (number,) = tokenizer.encode_with_control_tokens(token).tolist()
        expect(number not in tokenizer.encode(f"a {token} b").tolist(), f"a text can forge {token}")
        expect(
            number in tokenizer.encode_with_control_tokens(f"a {token} b").tolist(), f"a template can't write {token}"
        )
        expect(token in tokenizer.decode_with_control_tokens([number]), f"{token} is not written out")


def prompts_depend_on_every_message(prompts: ChatPrompts) -> None:
    """Prompts are int32 ids, the same for the same messages, and differ for another message at any position."""
    turns = [("user", "one"), ("assistant", "two"), ("user", "three")]
    messages = [{"role": role, "content": text} for role, text in turns]
    ids = prompts.encode_messages_as_prompt(messages)
    expect(ids.dtype == np.int32 and ids.ndim == 1 and len(ids), f"a prompt is {ids.dtype} of shape {ids.shape}")
    expect(np.array_equal(ids, prompts.encode_messages_as_prompt(messages)), "the same messages have another prompt")
    for index, message in enumerate(messages):
        others = [*messages[:index], {**message, "content": "four"}, *messages[index + 1 :]]
        expect(
            not np.array_equal(ids, prompts.encode_messages_as_prompt(others)), f"message {index} is not in the prompt"
        )
    expect(prompts.answer_end_ids, "no id ends an answer")
