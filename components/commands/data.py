"""show the first documents of a recipe's data, with what is trained of them marked"""

import argparse
from collections.abc import Iterator
from itertools import groupby
from typing import Any, get_args

from rich.console import Console
from rich.text import Text

from drawloom.components.ports.corpus import Split, TokenCorpus, TokenDocuments, Tokenizer
from drawloom.graph import UserError
from drawloom.graph.cli.project import Project
from drawloom.graph.cli.terminal import print_text, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("action", choices=["show"], help="print documents as they are trained on")
    parser.add_argument("recipe", metavar="RECIPE", help="a path, or the name of a shipped recipe")
    parser.add_argument("--overlay", action="append", default=[], metavar="FILE", help="a recipe to merge over it")
    parser.add_argument("--split", choices=get_args(Split), default="train", help="which split (default train)")
    parser.add_argument("--rows", type=int, default=3, metavar="N", help="how many documents (default 3)")
    parser.epilog = "Single values are set by node.key=value. Trained tokens are green, or between ⟦ and ⟧ in a file."


def main(options: argparse.Namespace, project: Project) -> int:
    """Print documents; green, or in a file between ⟦ and ⟧, is what is a target."""
    graph = project.graph(project.load(options.recipe, options.overlay, options.words))
    names = [_only(graph.or_error(), port) for port in (TokenCorpus, Tokenizer)]
    with project.container(graph.restricted_to(names), *names) as objects:
        corpus, tokenizer = (objects[name] for name in names)
        documents = corpus.documents(options.split)
        for number in range(min(options.rows, len(documents.lengths))):
            _show(documents, number, tokenizer)
    return 0


def _show(documents: TokenDocuments, number: int, tokenizer: Any) -> None:
    length = int(documents.lengths[number])
    parts = list(_parts(documents, number, length, tokenizer))
    trained = sum(count for _, count, is_trained in parts if is_trained)
    print_text(f"--- {documents.source(number)}: {length} tokens, of which {trained} are trained")
    console = Console(highlight=False, soft_wrap=True)
    shown = Text()
    for text, _, is_trained in parts:
        marked = f"⟦{text}⟧" if is_trained and not console.is_terminal else text
        shown.append(printable(marked), "bold green" if is_trained else "")
    console.print(shown)


def _parts(documents: TokenDocuments, number: int, length: int, tokenizer: Any) -> Iterator[tuple[str, int, bool]]:
    """Runs of tokens that are trained, or are not: text, how many, and which. The first token is never a target."""
    ids, weights = documents.tokens(number, 0, length), documents.weights(number, 0, length)
    pairs = [(int(each), place > 0 and (weights is None or weights[place] > 0)) for place, each in enumerate(ids)]
    for is_trained, run in groupby(pairs, key=lambda pair: bool(pair[1])):
        held = [each for each, _ in run]
        yield _text(tokenizer, held), len(held), is_trained


def _text(tokenizer: Any, ids: list[int]) -> str:
    """The text of ids; control tokens are written out if the tokenizer has any."""
    written = getattr(tokenizer, "decode_control", None)
    return str(tokenizer.decode(ids) if written is None else written(ids))


def _only(graph: Any, port: type) -> str:
    names: list[str] = graph.implementers(port)
    if len(names) != 1:
        raise UserError(f"the recipe has {len(names)} nodes that are a {port.__name__}; one is required", 2)
    return names[0]
