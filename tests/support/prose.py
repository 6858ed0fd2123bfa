"""Counts of words in docstrings and in names, for `make figures` and `tests/house/test_prose.py`."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("graph", "kernels", "components", "src", "tests")
"""Folders with a budget of their own."""

WORDS = ("of", "that", "what", "those", "which", "each")
"""Words of which a docstring full of pronouns has many."""

IDENTIFIERS = ("each", "found", "place", "held", "of")
"""Names of variables that do not say what the variable is."""

PARTICIPLE = re.compile(
    r"_*(?!need|feed|seed|embed)([a-z]+ed|made|found|held|kept|given|taken|sent|written|drawn)(_\w*)?"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees(room: str) -> list[ast.Module]:
    """Return the syntax trees of all modules in a room."""
    return [ast.parse(path.read_bytes()) for path in sorted((ROOT / room).rglob("*.py"))]


def measure(modules: Iterable[ast.Module]) -> dict[str, float]:
    """
    Return occurrences per 1000, by word.

    Words are counted in docstrings and docs of settings, `identifier` among parameters and assigned names, and
    participles among names of functions.
    """
    nodes = [node for module in modules for node in ast.walk(module)]
    words = Counter(word for text in _texts(nodes) for word in re.findall(r"[a-z']+", text.lower()))
    bindings = Counter(name for node in nodes for name in _bindings(node))
    functions = [node.name for node in nodes if isinstance(node, Function)]
    participles = [name for name in functions if PARTICIPLE.fullmatch(name)]
    return {
        **{word: 1000 * words[word] / words.total() for word in WORDS},
        **{f"`{name}`": 1000 * bindings[name] / bindings.total() for name in IDENTIFIERS},
        "participle functions": 1000 * len(participles) / len(functions),
    }


def worst_sentences(module: ast.Module, most: int = 5) -> list[str]:
    """Return a module's worst sentences by counted words, then its counted names, as `line: text`."""
    sentences = [
        (len(re.findall(rf"\b({'|'.join(WORDS)})\b", sentence.lower())) ** 2 / len(sentence.split()), line, sentence)
        for line, text in _lines_of_texts(ast.walk(module))
        for sentence in re.split(r"(?<=[.;:])\s+", " ".join(text.split()))
        if sentence
    ]
    names = [
        f"{getattr(node, 'lineno', 1)}: {name}"
        for node in ast.walk(module)
        for name in ((node.name,) if isinstance(node, Function) else _bindings(node))
        if name in IDENTIFIERS or (isinstance(node, Function) and PARTICIPLE.fullmatch(name))
    ]
    worst = sorted(sentences, key=lambda scored: -scored[0])[:most]
    return [f"{line}: {sentence}" for score, line, sentence in worst if score > 0.25] + names


def _texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    return (text for _, text in _lines_of_texts(nodes))


def _lines_of_texts(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
        if isinstance(node, ast.Call):
            is_setting = isinstance(node.func, ast.Name) and node.func.id.endswith("setting")
            values = [*node.args[: int(is_setting)], *(word.value for word in node.keywords if word.arg == "doc")]
            yield from ((value.lineno, str(value.value)) for value in values if isinstance(value, ast.Constant))


def _bindings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.arg):
        yield node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
