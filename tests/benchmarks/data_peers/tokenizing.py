"""
Tokenize a JSONL file with one of several libraries, and print the number of tokens.

python tokenizing.py WAY CORPUS TOKENIZER FOLDER: run in the environment of the library; drawloom is not imported.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

END = "<|end|>"
BATCH = 10**6  # characters that are encoded together


def texts(corpus: Path) -> Iterator[str]:
    """Yield the texts of the lines."""
    with corpus.open(encoding="utf-8") as file:
        yield from (json.loads(line)["text"] for line in file)


def tokenizers_alone(corpus: Path, tokenizer: Path, _folder: Path) -> int:
    """Encode batches without keeping the ids."""
    encoder, tokens, batch, size = Tokenizer.from_file(str(tokenizer)), 0, [], 0
    for text in texts(corpus):
        batch.append(text)
        size += len(text)
        if size > BATCH:
            tokens += sum(len(encoding.ids) + 1 for encoding in encoder.encode_batch_fast(batch))
            batch, size = [], 0
    return tokens + sum(len(encoding.ids) + 1 for encoding in encoder.encode_batch_fast(batch))


def datasets_map(corpus: Path, tokenizer: Path, folder: Path) -> int:
    """Encode with `datasets.map` in its batches of 1000 documents, written to its cache."""
    from datasets import load_dataset

    encoder = Tokenizer.from_file(str(tokenizer))
    end = encoder.token_to_id(END)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        ids = [[*encoding.ids, end] for encoding in encoder.encode_batch_fast(batch["text"])]
        return {"input_ids": ids, "count": [*map(len, ids)]}

    data = load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(folder))
    mapped = data.map(encode, batched=True, remove_columns=data.column_names)
    return sum(mapped["count"])


def datatrove(corpus: Path, tokenizer: Path, folder: Path) -> int:
    """Encode with `DocumentTokenizer` in one task."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    encoder = {"tokenizer_name_or_path": str(tokenizer), "eos_token": END, "shuffle_documents": False}
    steps = [
        JsonlReader(str(corpus.parent), glob_pattern=corpus.name),
        DocumentTokenizer(str(folder / "tokens"), **encoder),
    ]
    LocalPipelineExecutor(pipeline=steps, tasks=1, workers=1, logging_dir=str(folder / "log")).run()
    return sum(path.stat().st_size for path in (folder / "tokens").glob("*.ds")) // 2


def megatron(corpus: Path, tokenizer: Path, folder: Path) -> int:
    """Add one document at a time to an `IndexedDatasetBuilder`, as Megatron's data script does."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    encoder = Tokenizer.from_file(str(tokenizer))
    end, tokens = encoder.token_to_id(END), 0
    builder = IndexedDatasetBuilder(str(folder / "data.bin"), dtype=np.uint16)
    for text in texts(corpus):
        ids = [*encoder.encode(text).ids, end]
        builder.add_document(ids, [len(ids)])
        tokens += len(ids)
    builder.finalize(str(folder / "data.idx"))
    return tokens


WAYS: dict[str, Callable[[Path, Path, Path], int]] = {
    "tokenizers": tokenizers_alone,
    "datasets": datasets_map,
    "datatrove": datatrove,
    "megatron": megatron,
}

if __name__ == "__main__":
    print("tokens", WAYS[sys.argv[1]](*map(Path, sys.argv[2:])))
