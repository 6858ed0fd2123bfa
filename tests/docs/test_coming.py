"""The page for people who come from other frameworks, and the table of names behind it."""

import itertools

import pytest

from drawloom.graph.foreign_names import read_foreign_names
from drawloom.graph.project import Project, Recipe
from drawloom.graph.registry.registry import Spec
from generate.coming import PAGE, page

RECIPES = ("chat", "dpo", "grpo", "first_run", "pretrain_tokenized")


def test_coming_page_is_up_to_date() -> None:
    """Its tables have the names in `foreign_names.toml`; `make golden` writes them."""
    assert PAGE.read_text("utf-8") == page()


def test_every_name_leads_to_a_setting_or_component_of_a_shipped_recipe() -> None:
    """A renamed setting of drawloom must be renamed in the table, too."""
    tables = read_foreign_names()
    graphs = [Recipe.load(name).graph for name in RECIPES]
    known = {f"{name}.{key}" for graph in graphs for name, node in graph.nodes.items() for key in node.spec.fields}
    known |= {f"{name}.use" for graph in graphs for name in graph.nodes}
    own = {*itertools.chain(*(tables[name].values() for name in ("trl", "axolotl", "torchtitan", "nanogpt")))}
    keys = {text.partition(" *")[0] for text in own if not text.startswith(("- ", "extends "))}
    elsewhere = {"vars.base", "vars.length", "vars.tokenizer", "adapters.lora", "corpus.paths"}
    elsewhere |= {"trackers.wandb.project", "lr.decay_percent", "lr.curve", "lr.end"}  # of other components
    assert keys - known == elsewhere
    registry = Project.from_package("drawloom").registry
    assert all(isinstance(registry.find(name), Spec) for name in tables["values"].values())


@pytest.mark.parametrize("name", read_foreign_names()["values"])
def test_a_component_of_another_framework_has_a_hint(name: str) -> None:
    """The hint names drawloom's component."""
    own = read_foreign_names()["values"][name]
    problems = Recipe.load("first_run", f"schedule.use={name.upper()}").graph.problems
    assert any(f"did you mean {own!r}?" in str(problem) for problem in problems)
