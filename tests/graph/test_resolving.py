"""The resolved recipe."""

from collections.abc import Callable

import tomli

from drawloom.graph.graph import Graph
from drawloom.graph.recipe import Recipe
from drawloom.graph.resolving import resolve
from drawloom.graph.workshop import Workshop

Shop = Callable[..., Graph]

AWKWARD = """
[page]
title = "$$5 and @@home \\u0007"
filters = [{ use = "pages.parse" }, "@look_up"]
[look_up]
use = "pages.look_up"
[trainer]
named = { "a b" = "@page" }
"""


def test_reading_it_again_gives_the_same(shop: Shop, workshop: Workshop) -> None:
    """The resolved text has the same hash and text when it is resolved again, whatever stands in it."""
    once = resolve(shop(AWKWARD), workshop.catalogue)
    again = resolve(workshop.graph(Recipe.of(tomli.loads(once.text))), workshop.catalogue)
    assert (again.text, again.hash) == (once.text, once.hash)


def test_defaults_and_found_edges_are_written_out(shop: Shop, workshop: Workshop) -> None:
    """A later change of a default, or another node that fits, can't change a run that was resolved before."""
    text = resolve(shop(), workshop.catalogue).text
    assert "size = 10" in text and 'store = "@store"' in text


def test_the_hash_is_of_what_is_said_not_how(shop: Shop, workshop: Workshop) -> None:
    """Writing a default out changes nothing; another value does."""
    same = [resolve(shop(text), workshop.catalogue).hash for text in ("", "[store]\nsize = 10")]
    assert same[0] == same[1] != resolve(shop("[store]\nsize = 11"), workshop.catalogue).hash
