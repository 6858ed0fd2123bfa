"""Settings that name something: each name is looked for among those that the nodes of the graph offer."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import attrs

from drawloom.graph.build.node import Node, NodeView, dotted
from drawloom.graph.problems import Problem
from drawloom.graph.recipe.layers import Path
from drawloom.graph.setting import Names
from drawloom.graph.toml.suggest import did_you_mean
from drawloom.graph.types.port_match import implements

VALUE = "value"
"""The kind of what members of sequences write."""


def check_names(nodes: Mapping[str, Node]) -> Iterator[Problem]:
    """Names that nobody offers."""
    offers: dict[str, set[str]] | None = None
    for node in nodes.values():
        for path, text, names in _uses(node):
            if isinstance(names.kind, type):
                known, kind = _fitting(nodes, names.kind), f"node that is a {names.kind.__name__}"
            else:
                offers = _offers(nodes) if offers is None else offers
                if names.kind not in offers:
                    continue  # nobody knows what there is
                known, kind = offers[names.kind], names.kind
            found = any(fnmatchcase(name, text) for name in known) if names.patterns else text in known
            if not found:
                verb = "matches" if names.patterns else "is called"
                words = f"{dotted(path)}: no {kind} {verb} {text!r}"
                yield Problem("DL308", words, did_you_mean(text, known), node.name, node.place_of(path))


def _uses(node: Node) -> Iterator[tuple[Path, str, Names]]:
    """Every text in the settings of a node that names something."""
    for field in node.spec.fields.values():
        if field.may_name and field.name in node.settings:
            yield from _inside(node.settings[field.name], (field.name,), field.names)


def _inside(value: Any, path: Path, names: Names | None) -> Iterator[tuple[Path, str, Names]]:
    if isinstance(value, str):
        if names is not None:
            yield path, value, names
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _inside(part, (*path, key), names)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _inside(part, (*path, number), names)
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            yield from _inside(getattr(value, field.name), (*path, field.alias), field.metadata.get("names"))


def _fitting(nodes: Mapping[str, Node], port: type) -> set[str]:
    return {name for name, node in nodes.items() if implements(node.spec.cls, port)}


def _offers(nodes: Mapping[str, Node]) -> dict[str, set[str]]:
    """What there is of each kind, as far as nodes say."""
    offers: dict[str, set[str]] = {}
    for node in nodes.values():
        if node.spec.traits.flow.writes:
            offers.setdefault(VALUE, set()).update(node.spec.traits.flow.writes)
        told: Mapping[str, Iterable[str]] = {}
        if not node.invalid and hasattr(node.spec.cls, "offers"):
            told = node.spec.cls.offers(NodeView(node, nodes))
        for kind, names in told.items():
            offers.setdefault(kind, set()).update(names)
    return offers
