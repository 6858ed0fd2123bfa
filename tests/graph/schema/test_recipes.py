"""The schema of recipes."""

from pathlib import Path
from typing import Any

import pytest
import tomli
from jsonschema import Draft7Validator

from drawloom.graph.cli.project import Project
from drawloom.graph.problems import RecipeError
from drawloom.graph.recipe.layers import Table
from drawloom.graph.schema.recipes import recipe_schema
from support.golden import FAULTY

ROOT = Path(__file__).parents[3]
WORKSHOP = Project.of("drawloom")
SHIPPED = sorted((ROOT / "recipes").glob("*.toml"))

CODES = {"DL201", "DL203", "DL204", "DL302", "DL303", "DL306", "DL310", "DL311", "DL312"}
"""Problems that show in a node alone, so that a schema can tell of them."""

UNSEEN = {
    "cadence_zero",  # checks that are no bounds
    "float_for_integer",  # for JSON 2.0 is an integer
    "not_a_number",  # JSON has no such number
    "integer_too_large",  # nor a bound for integers
    "variable_of_wrong_type",  # variables stand for anything
    "group_with_setting",
}
"""What of these only Python can tell."""


@pytest.fixture(scope="module")
def validator() -> Draft7Validator:
    """The schema of all that ships."""
    schema = recipe_schema(WORKSHOP.registry, WORKSHOP.usual())
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def merged(table: Table) -> dict[str, Any]:
    """A recipe with all that it extends, as one file would say it."""
    return {key: merged(item) if isinstance(item, Table) else item.value for key, item in table.items.items()}


def faults(recipe: Path) -> tuple[set[str], dict[str, Any]]:
    """The codes of what is wrong with a recipe, and the recipe as one file."""
    try:
        loaded = WORKSHOP.load(str(recipe))
    except RecipeError as error:
        return {problem.code for problem in error.problems}, {}
    return {problem.code for problem in WORKSHOP.graph(loaded).faults}, merged(loaded.tree)


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(validator: Draft7Validator, recipe: Path) -> None:
    """As files, and as what they become with all that they extend."""
    for data in (tomli.loads(recipe.read_text("utf-8")), merged(WORKSHOP.load(str(recipe)).tree)):
        assert [error.message for error in validator.iter_errors(data)] == []


def test_faulty_recipes_are_caught_if_a_schema_can(validator: Draft7Validator) -> None:
    """Of the recipes with one fault, those are caught whose fault is of a kind that shows in a node alone."""
    missed, false = [], []
    for recipe in sorted(FAULTY.glob("*.toml")):
        codes, data = faults(recipe)
        valid = validator.is_valid(data)
        if valid and codes & CODES and recipe.stem not in UNSEEN:
            missed.append(recipe.stem)
        if not valid and not codes:
            false.append(recipe.stem)
    assert (missed, false) == ([], [])


def test_misspelt_keys_of_usual_nodes_are_offered(validator: Draft7Validator) -> None:
    """A table without `use` offers the keys of what that name is in shipped recipes, but refuses none."""
    clip = validator.schema["properties"]["clip"]  # type: ignore[index]
    assert "max_norm" in clip["anyOf"][0]["properties"]
    assert validator.is_valid({"clip": {"of_my_own": 1}})


def test_a_description_is_what_the_docstring_says(validator: Draft7Validator) -> None:
    """Editors show a component's docstring, and each setting's line."""
    clip = validator.schema["definitions"]["gradients.clip_norm"]  # type: ignore[index]
    spec: Any = WORKSHOP.registry.find("gradients.clip_norm")
    assert clip["description"].startswith(spec.doc)
    assert clip["properties"]["max_norm"]["description"] == spec.fields["max_norm"].doc
