"""Schemas of types of settings."""

from typing import Any

import tomli
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from drawloom.graph.registry.spec import read_spec
from drawloom.graph.schema.types import setting_schema
from drawloom.graph.types.structure import Values
from support.made_up import SETTINGS
from support.shop.components.stores.varied import Varied

SPEC = read_spec("stores.varied", Varied)
VALIDATORS = {name: Draft7Validator(setting_schema(f.type, f.check)) for name, f in SPEC.fields.items()}
WRITTEN = st.one_of(*SETTINGS.values())


def as_json(plain: Any) -> Any:
    """TOML's own types as text, as editors make it."""
    if isinstance(plain, dict):
        return {key: as_json(part) for key, part in plain.items()}
    if isinstance(plain, list):
        return [as_json(part) for part in plain]
    return plain if isinstance(plain, str | bool | int | float) else plain.isoformat()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(SETTINGS)), st.data())
def test_what_settings_take_is_valid(name: str, data: st.DataObject) -> None:
    """Whatever a recipe may write for a setting, its schema accepts."""
    assert VALIDATORS[name].is_valid(as_json(data.draw(SETTINGS[name])))


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(sorted(SETTINGS)), WRITTEN)
def test_what_a_schema_refuses_settings_refuse(name: str, value: Any) -> None:
    """A schema never complains of what a recipe may say; it may miss what only Python can tell."""
    field = SPEC.fields[name]
    if not VALIDATORS[name].is_valid(as_json(value)):
        written_as_reference = isinstance(value, str) and value[:1] in ("@", "$")
        assert written_as_reference or Values().structure(value, field.type, field.check)[1]


def test_bounds_are_told() -> None:
    """A check that is a bound is part of the schema."""
    assert not VALIDATORS["part"].is_valid(0.0) and VALIDATORS["part"].is_valid(0.1)
    assert not VALIDATORS["shelf"].is_valid({"width": 0}) and VALIDATORS["shelf"].is_valid({"width": 1})


def test_unknown_keys_inside_and_missing_ones_are_told() -> None:
    """A table that is an attrs class has its fields and no others."""
    assert not VALIDATORS["shelf"].is_valid({"width": 1, "hight": 2}) and not VALIDATORS["shelf"].is_valid({})


def test_a_variable_may_stand_anywhere() -> None:
    """Whole values and items of arrays may be variables, and nothing but those begins with one dollar."""
    data = tomli.loads('a = "$vars.x"\nb = ["$vars.y"]\nc = "$x"')
    assert VALIDATORS["whole"].is_valid(data["a"]) and VALIDATORS["numbers"].is_valid(data["b"])
    assert not VALIDATORS["text"].is_valid(data["c"])
