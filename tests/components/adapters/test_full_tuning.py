"""Full tuning of named parts."""

from drawloom.components.adapters.full_tuning import FullTuning
from drawloom.components.weights.adapted import build_meta_model_with_adapters
from support.qwen3 import dense


def test_parameters_and_all_of_a_module_are_named() -> None:
    """A target is a parameter, a module with its contents, or a pattern; the end of a name begins at a dot."""

    def trained_names(*targets: str) -> set[str]:
        module = build_meta_model_with_adapters(dense(), [FullTuning(targets=list(targets))])
        return {name for name, parameter in module.named_parameters() if parameter.requires_grad}

    assert trained_names("norm") == trained_names("model.norm") == {"model.norm.weight"}
    assert len(trained_names("layers.1")) == 11 and all(".1." in name for name in trained_names("layers.1"))
    assert trained_names("*layernorm.weight", "lm_head") == {
        f"model.layers.{n}.{name}_layernorm.weight" for n in (0, 1) for name in ("input", "post_attention")
    } | {"lm_head.weight"}
