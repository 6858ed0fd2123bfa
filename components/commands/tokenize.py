"""tokenize files into a token store, or complete an interrupted store"""

import argparse
import os
import sys
from pathlib import Path

from drawloom.components.commands._options import make_integer_parser
from drawloom.components.data.bytes import Bytes
from drawloom.components.data.hugging_face_tokenizer import HuggingFaceTokenizer, read_eos_token, read_tokenizer
from drawloom.components.data.sources.files import find_files
from drawloom.components.data.sources.parts import split_files_into_parts
from drawloom.components.data.store.build import build_store
from drawloom.components.ports.corpus import Tokenizer
from drawloom.graph import UserError
from drawloom.graph.cli.result import Result, output, output_class
from drawloom.graph.cli.terminal import print_escaped_text
from drawloom.graph.project import Project


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line arguments."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, folders, globs, or URLs (fsspec)")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder of the token store")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="tokenizer.json (default: one token per byte)")
    parser.add_argument("--end-token", metavar="TOKEN", help="end-of-document token (default: the tokenizer's)")
    help = "first token of documents; '': none (default: as the tokenizer's post-processor says)"
    parser.add_argument("--begin-token", metavar="TOKEN", help=help)
    parser.add_argument("--field", default="text", metavar="NAME", help="field or column with the text (default: text)")
    parser.add_argument("--workers", type=make_integer_parser(), metavar="N", help="processes (default: one per core)")


@output_class
class TokenizeResult(Result):
    """A token store."""

    folder: Path = output("folder of the store")
    documents: int = output("number of documents")
    tokens: int = output("number of tokens")

    def render(self, format: str) -> str:
        """Return one line with the size."""
        return f"{self.folder}: {self.documents:,} documents, {self.tokens:,} tokens"


def main(options: argparse.Namespace, _project: Project) -> TokenizeResult:
    """Make or complete the store."""
    tokenizer = _load_tokenizer_or_bytes(options)
    files = find_files(options.paths)
    workers = options.workers or len(os.sched_getaffinity(0))
    store = build_store(
        options.to,
        split_files_into_parts(files, options.field),
        tokenizer,
        workers=workers,
        say=lambda text: print_escaped_text(text, "stderr"),
        report_interval=1 if sys.stderr.isatty() else 10,
    )
    return TokenizeResult(options.to, len(store.lengths), store.token_count)


def _load_tokenizer_or_bytes(options: argparse.Namespace) -> Tokenizer:
    """Return the tokenizer for the options, or bytes. Raises UserError if its end token is unknown."""
    if options.tokenizer is None:
        if options.end_token is not None or options.begin_token is not None:
            name = "--begin-token" if options.end_token is None else "--end-token"
            raise UserError(f"{name} needs --tokenizer: without it tokens are bytes, which have an end token", 2)
        return Bytes()
    path = options.tokenizer / "tokenizer.json" if options.tokenizer.is_dir() else options.tokenizer
    read_tokenizer(path)
    if (end := options.end_token or read_eos_token(path.parent)) is None:
        config = path.with_name("tokenizer_config.json")
        raise UserError(f"{config} names no eos_token; write --end-token, the token that ends a document", 2)
    tokenizer = HuggingFaceTokenizer(path=path, end_token=end, begin_token=options.begin_token)
    tokenizer.open()
    return tokenizer
