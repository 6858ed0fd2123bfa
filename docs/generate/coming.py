"""The tables of coming.md: names in other frameworks, and drawloom's."""

from collections.abc import Iterator

from drawloom.graph.foreign_names import read_foreign_names
from generate.source import ROOT

PAGE = ROOT / "docs" / "coming.md"
HEAD = "## Names\n"
TITLES = {
    "trl": "Trainer of transformers, and TRL",
    "axolotl": "axolotl",
    "torchtitan": "torchtitan 0.2",
    "nanogpt": "nanoGPT",
}


def page() -> str:
    """Return the page with new tables behind the heading."""
    text, _, _ = PAGE.read_text("utf-8").partition(HEAD)
    return text + HEAD + "".join(_iterate_tables())


def _iterate_tables() -> Iterator[str]:
    tables = read_foreign_names()
    for name, title in TITLES.items():
        yield f"\n### {title}\n\n| {title.partition(' of ')[0]} | drawloom |\n|-|-|\n"
        for foreign, own in tables[name].items():
            yield f"| `{foreign}` | {_format_target(str(own))} |\n"
    yield "\n### Components\n\n| elsewhere | drawloom |\n|-|-|\n"
    for foreign, own in tables["values"].items():
        yield f"| `{foreign}` | `{own}` |\n"


def _format_target(own: str) -> str:
    """Return a table's value as a cell."""
    if own.startswith("- "):
        return own[2:]
    if own.startswith("extends "):
        return f"`--overlay {own.removeprefix('extends ')}`"
    key, _, factor = own.partition(" * ")
    return f"`{key}`" + (f", times {factor}" if factor else "")
