"""tokenize files into a token store, or complete an interrupted store"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from drawloom.components.data.auto_tokenizer import read_special_tokens
from drawloom.components.data.bytes import Bytes
from drawloom.components.data.hugging_face_tokenizer import HuggingFaceTokenizer, read_tokenizer
from drawloom.components.data.sources.files import find_files
from drawloom.components.data.sources.formats import split_files_into_parts
from drawloom.components.data.store.build import build_store
from drawloom.graph.cli.command import (
    Command,
    Count,
    Project,
    Result,
    UserError,
    argument,
    command,
    option,
    output,
    output_class,
    print_escaped_text,
)
from drawloom.ports import Tokenizer


@output_class
class TokenizeResult(Result):
    """A token store."""

    folder: Path = output("folder of the store")
    documents: int = output("number of documents")
    tokens: int = output("number of tokens")

    def render(self, format: str) -> str:
        """Return one line with the size."""
        return f"{self.folder}: {self.documents:,} documents, {self.tokens:,} tokens"


@command
class TokenizeCommand(Command):
    """A token store that is made or completed."""

    paths: Sequence[str] = argument("files, folders, globs, or URLs (fsspec)", metavar="PATH")
    to: Path = option("folder of the token store", metavar="FOLDER")
    tokenizer: Path | None = option("tokenizer.json (default: one token per byte)", metavar="PATH")
    end_token: str | None = option(
        "end-of-document token (default: the tokenizer's)", metavar="TOKEN", needs="tokenizer"
    )
    begin_token: str | None = option(
        "first token of documents; '': none (default: as the tokenizer's post-processor says)",
        metavar="TOKEN",
        needs="tokenizer",
    )
    field: str = option("field or column with the text", default="text", metavar="NAME")
    workers: Count | None = option("processes (default: one per core)")

    def run(self, project: Project) -> TokenizeResult:
        store = build_store(
            self.to,
            split_files_into_parts(find_files(self.paths), self.field),
            self._load_tokenizer_or_bytes(),
            workers=self.workers or len(os.sched_getaffinity(0)),
            say=lambda text: print_escaped_text(text, "stderr"),
            report_interval=1 if sys.stderr.isatty() else 10,
        )
        return TokenizeResult(self.to, len(store.lengths), store.token_count)

    def _load_tokenizer_or_bytes(self) -> Tokenizer:
        """Return the tokenizer of the options, or bytes. Raises UserError if its end token is unknown."""
        if self.tokenizer is None:
            return Bytes()
        path = self.tokenizer / "tokenizer.json" if self.tokenizer.is_dir() else self.tokenizer
        read_tokenizer(path)
        if (end := self.end_token or read_special_tokens(path.parent).get("eos_token")) is None:
            config = path.with_name("tokenizer_config.json")
            raise UserError(f"{config} names no eos_token; write --end-token, the token that ends a document", 2)
        tokenizer = HuggingFaceTokenizer(path=path, end_token=end, begin_token=self.begin_token)
        tokenizer.open()
        return tokenizer
