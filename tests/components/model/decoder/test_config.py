"""Keys of configs: one declaration is the setting, its documentation, and the check of recipes and files."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from drawloom.components.model.auto import FAMILIES
from drawloom.components.model.decoder.builder import DecoderBuilder, find_setting_faults
from drawloom.components.model.decoder.config import DecoderConfig, Family
from drawloom.components.model.phi3 import Phi3
from drawloom.graph import UserError, at_least, component, setting
from drawloom.graph.project import Recipe
from drawloom.graph.registry.registry import read_spec
from drawloom.graph.types.structure import CONVERTER
from support.families import small
from support.qwen3 import SIZES


class ToyConfig(DecoderConfig):
    """Config with a changed default, its own key, and a nullable key."""

    rope_theta: float = 5e4
    stride: int = setting(default=3, check=at_least(2), impact="changes_training", doc="tokens per patch")
    limit: int | None = setting(default=None, check=at_least(1), doc="tokens in all; default: any number")


@component(impact="incompatible")
class Toy(DecoderBuilder):
    """A model with the layers of Llama."""

    config_type = ToyConfig
    model_type = "toy"
    class_name = "ToyForCausalLM"


def test_key_declared_once_is_a_setting_with_its_documentation() -> None:
    """The component has a setting for each key, None by default, with the key's type, check, impact and default."""
    fields = read_spec("toy", Toy).fields
    assert fields.keys() > {field.name for field in attrs.fields(ToyConfig)}
    stride, theta, limit = fields["stride"], fields["rope_theta"], fields["limit"]
    assert (stride.type, stride.default, stride.impact) == (int | None, None, "changes_training")
    assert stride.doc == "tokens per patch; default: 3" and stride.check == at_least(2)
    assert theta.doc == "base of rotary positions; default: 50000" and theta.check is not None
    assert (limit.type, limit.impact, limit.doc) == (int | None, "incompatible", "tokens in all; default: any number")
    assert isinstance(small(Toy, stride=5).architecture, ToyConfig)
    with pytest.raises(ValueError, match="stride: 1 is less than 2"):
        small(Toy, stride=1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stride": 1}, "an invalid stride: 1 is less than 2"),
        ({"stride": 2.5}, "an invalid stride: expected an integer"),
        ({"limit": 0}, "an invalid limit: 0 is less than 1"),
        ({"rope_theta": 0.5}, "an invalid rope_theta: 0.5 is not above 1"),
        ({"stride": None, "limit": None}, None),
    ],
)
def test_declared_check_applies_to_files(changes: dict[str, Any], reason: str | None, tmp_path: Path) -> None:
    """A file is refused for the reason a recipe would be; null is valid if the type allows it, else the default."""
    (tmp_path / "config.json").write_text(json.dumps(small(Toy).hugging_face_config() | changes))
    model = small(Toy, config=tmp_path)
    if reason is None:
        assert model.architecture == small(Toy).architecture
    else:
        with pytest.raises(UserError, match=reason):
            model.check_before_open()


def test_key_without_documentation_is_refused() -> None:
    """A new key without `setting` is the family author's error, named at import."""

    class Undocumented(DecoderConfig):
        stride: int = 3

    with pytest.raises(TypeError, match=r"Undocumented\.stride has no documentation"):

        class Unread(Family):
            config_type = Undocumented


def test_defaults_fit_their_own_declarations() -> None:
    """Our defaults and transformers' pass the type and the check of their key, in all families."""
    for kind in dict.fromkeys(FAMILIES.values()):
        for key, value in [*kind.key_defaults.items(), *kind.hf_defaults.items()]:
            field = kind.keys[key]
            assert CONVERTER.structure(value, field.type, field.metadata["check"])[1] == [], (kind, key)


def test_check_knows_the_words_and_defaults_of_a_key() -> None:
    """A misspelt layer type is a problem in every family; a rotated part is compared with head_dim's default."""
    words = 'model.layer_types=["linear_attention", "ful_attention", "linear_attention", "full_attention"]'
    [problem] = Recipe.load("first_run", "model.use=model.qwen3_5", words).graph.errors
    assert "layer_types" in problem.text and problem.hint == 'did you mean "full_attention"?'
    odd = dict.fromkeys((*Phi3.keys, "rope_parameters", "config"))
    odd |= SIZES | {"head_dim": None, "partial_rotary_factor": 0.5}
    [fault] = find_setting_faults(Phi3, odd, False)
    assert (fault.key, fault.why) == (
        "partial_rotary_factor",
        "partial_rotary_factor = 0.5 rotates 3 channels of head_dim = 6",
    )
