"""JSON schemas of settings and recipes."""

from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Project
from drawloom.graph.recipe.layers import Table
from drawloom.graph.registry.registry import read_spec
from drawloom.graph.schema import make_recipe_schema, make_setting_schema
from drawloom.graph.types.structure import ValueConverter
from support.golden import write_faulty
from support.made_up import SETTINGS
from support.shop.components.stores.varied import Varied

SPEC = read_spec("stores.varied", Varied)
VALIDATORS = {name: Draft7Validator(make_setting_schema(f.type, f.check)) for name, f in SPEC.fields.items()}
WRITTEN = st.one_of(*SETTINGS.values())


def as_json(plain: Any) -> Any:
    """Convert dates and times to text, like editors do."""
    if isinstance(plain, dict):
        return {key: as_json(part) for key, part in plain.items()}
    if isinstance(plain, list):
        return [as_json(part) for part in plain]
    return plain if isinstance(plain, str | bool | int | float) else plain.isoformat()


@given(st.sampled_from(sorted(SETTINGS)), st.data())
def test_a_value_that_a_setting_accepts_is_valid(name: str, data: st.DataObject) -> None:
    """The schema accepts every value that a setting accepts."""
    assert VALIDATORS[name].is_valid(as_json(data.draw(SETTINGS[name])))


@given(st.sampled_from(sorted(SETTINGS)), WRITTEN)
def test_a_value_refused_by_the_schema_is_an_invalid_setting(name: str, value: Any) -> None:
    """The schema refuses no valid value; it may accept values that only Python checks refuse."""
    field = SPEC.fields[name]
    if not VALIDATORS[name].is_valid(as_json(value)):
        written_as_reference = isinstance(value, str) and value[:1] in ("@", "$")
        assert written_as_reference or ValueConverter().structure(value, field.type, field.check)[1]


def test_bounds_are_part_of_the_schema() -> None:
    """Checks that are bounds are in the schema."""
    assert not VALIDATORS["part"].is_valid(0.0) and VALIDATORS["part"].is_valid(0.1)
    assert not VALIDATORS["shelf"].is_valid({"width": 0}) and VALIDATORS["shelf"].is_valid({"width": 1})


def test_unknown_and_missing_keys_inside_a_setting_are_invalid() -> None:
    """A table of an attrs class accepts the class's fields only."""
    assert not VALIDATORS["shelf"].is_valid({"width": 1, "hight": 2}) and not VALIDATORS["shelf"].is_valid({})


def test_a_variable_is_valid_anywhere() -> None:
    """Variables are valid as values and array items, and other strings do not begin with one dollar."""
    data = tomli.loads('a = "$vars.x"\nb = ["$vars.y"]\nc = "$x"')
    assert VALIDATORS["whole"].is_valid(data["a"]) and VALIDATORS["numbers"].is_valid(data["b"])
    assert not VALIDATORS["text"].is_valid(data["c"])


ROOT = Path(__file__).parents[2]
PROJECT = Project.from_package("drawloom")
SHIPPED = sorted((ROOT / "recipes").rglob("*.toml"))

CODES = {"DL201", "DL203", "DL204", "DL302", "DL303", "DL306", "DL310", "DL311", "DL312"}
"""Problems within a single node, which a schema can find."""

UNSEEN = {
    "cadence_zero",  # checks that are not bounds
    "float_for_integer",  # JSON treats 2.0 as an integer
    "not_a_number",  # JSON has no such number
    "integer_too_large",  # JSON has no bound for integers
    "variable_of_wrong_type",  # variables stand for anything
    "group_with_setting",
    "lengths_in_two_units",  # a base may set the other one
}
"""Recipes with such problems that only Python can find."""


@pytest.fixture(scope="module")
def validator() -> Draft7Validator:
    """Return a validator for the schema of all shipped components and nodes."""
    schema = make_recipe_schema(PROJECT.registry, PROJECT.shipped_components_by_node())
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def to_dict(table: Table) -> dict[str, Any]:
    """Return the values of a merged recipe as one table."""
    return {key: to_dict(item) if isinstance(item, Table) else item.value for key, item in table.items.items()}


def find_problems(recipe: Path) -> tuple[set[str], dict[str, Any]]:
    """Return a recipe's problem codes, and the merged recipe as one table."""
    try:
        loaded = PROJECT.load(str(recipe))
    except RecipeError as error:
        return {problem.code for problem in error.problems}, {}
    return {problem.code for problem in PROJECT.graph(loaded).errors}, to_dict(loaded.tree)


def test_shipped_recipes_are_valid(validator: Draft7Validator) -> None:
    """Shipped recipes are valid as files and merged with their bases. A table of many recipes is validated once."""
    recipes = [tomli.loads(path.read_text("utf-8")) for path in SHIPPED]
    recipes += [to_dict(PROJECT.load(str(path)).tree) for path in SHIPPED]
    tables = {repr((name, value)): {name: value} for recipe in recipes for name, value in recipe.items()}
    assert [(text, error.message) for text, table in tables.items() for error in validator.iter_errors(table)] == []


@pytest.mark.soak
def test_faulty_recipes_are_caught_if_a_schema_can(validator: Draft7Validator, tmp_path: Path) -> None:
    """The schema refuses recipes with a problem within a single node, and no valid recipe."""
    missed, refused_valid = [], []
    write_faulty(tmp_path / "faulty")
    for recipe in sorted(tmp_path.glob("faulty/*.toml")):
        if recipe.read_text("utf-8").startswith("# project: shop"):
            continue
        codes, data = find_problems(recipe)
        if codes & CODES and recipe.stem not in UNSEEN and validator.is_valid(data):
            missed.append(recipe.stem)
        if not codes and not validator.is_valid(data):
            refused_valid.append(recipe.stem)
    assert (missed, refused_valid) == ([], [])


@pytest.mark.parametrize(
    ("edit", "valid"),
    [
        ('edit.trainer.phases = { remove = "@clip", after = { "@lr" = ["@clip"] } }', True),
        ('edit.trackers.aim.tags.before.one = "two"', True),
        ("edit = []", False),
        ('edit.trainer = "@clip"', False),
        ('edit.trainer.phases = ["@clip"]', False),
        ('edit.trainer.phases.after = "@clip"', False),
        ('edit.trainer.phases.delete = "@clip"', False),
    ],
)
def test_schema_accepts_edits_of_lists_and_refuses_malformed_ones(
    validator: Draft7Validator, edit: str, valid: bool
) -> None:
    """An edit is a table named by a list, with elements to remove and tables of elements to insert."""
    assert validator.is_valid(tomli.loads(edit)) is valid


def test_misspelt_keys_of_usual_nodes_are_offered(validator: Draft7Validator) -> None:
    """A table without `use` offers the keys of the shipped node with its name, but accepts any key."""
    clip = validator.schema["properties"]["clip"]  # type: ignore[index]
    assert "max_norm" in clip["anyOf"][0]["properties"]
    assert validator.is_valid({"clip": {"of_my_own": 1}})


def test_schema_descriptions_come_from_docstrings(validator: Draft7Validator) -> None:
    """Editors show component docstrings and setting docs."""
    clip = validator.schema["definitions"]["gradients.clip_norm"]  # type: ignore[index]
    spec: Any = PROJECT.registry.find("gradients.clip_norm")
    assert clip["description"].startswith(spec.summary)
    assert clip["properties"]["max_norm"]["description"] == spec.fields["max_norm"].doc
