"""The component `model.qwen3.moe`."""

from collections.abc import Iterator, Sequence

from drawloom import at_least, component, setting
from drawloom.components.model.declarations import (
    DecoderBuilder,
    InvalidSetting,
    MoeConfig,
    find_dense_width_faults,
    training_setting,
)
from drawloom.components.model.qwen3.dense import FIXED
from drawloom.ports import Settings


class Qwen3MoeConfig(MoeConfig):
    """Config of Qwen3 with experts. `mlp_only_layers` numbers the layers without experts."""

    qk_norm = "head"

    norm_topk_prob: bool = training_setting(
        "normalise the probabilities of a token's experts to a sum of 1", default=True
    )
    decoder_sparse_step: int = setting("the last of every so many layers has experts", default=1, check=at_least(1))
    mlp_only_layers: list[int] = setting("indices of layers without experts; default: none", factory=list)

    def layer_has_experts(self, number: int) -> bool:
        return layer_has_experts(number, self.decoder_sparse_step, self.mlp_only_layers)

    @classmethod
    def find_faults(cls, given: Settings) -> Iterator[InvalidSetting]:
        """Yield the faults in layer numbers, and the fault if a layer without experts has no size."""
        yield from super().find_faults(given)
        layers, step = given["num_hidden_layers"], given["decoder_sparse_step"]
        dense = given.get("mlp_only_layers", ())
        if strange := [number for number in dense if not 0 <= number < layers]:
            why = f"mlp_only_layers names layer {strange[0]}, and layers are counted from 0 to {layers - 1}"
            yield InvalidSetting("mlp_only_layers", why, f"remove {strange[0]}")
        elif not any(layer_has_experts(number, step, dense) for number in range(layers)):
            key = "decoder_sparse_step" if step > layers else "mlp_only_layers"
            yield InvalidSetting(key, "no layer has experts", 'write less, or use = "model.qwen3.dense"')
        else:
            yield from find_dense_width_faults(
                given, [n for n in range(layers) if not layer_has_experts(n, step, dense)]
            )


def layer_has_experts(number: int, sparse_step: int, dense_layers: Sequence[int]) -> bool:
    """Return whether layer `number` has experts: every `sparse_step`-th layer has, except for `dense_layers`."""
    return number not in dense_layers and (number + 1) % sparse_step == 0


@component(impact="incompatible")
class Qwen3Moe(DecoderBuilder):
    """
    A Qwen3 language model with experts, of sizes given here or by a Hugging Face `config.json`.

    A router sends each token to a few experts of a layer. A load-balancing loss over the tokens of each row and a
    z-loss add their gradients in training, and are no part of the reported losses.
    """

    config_type = Qwen3MoeConfig
    model_type = "qwen3_moe"
    class_name = "Qwen3MoeForCausalLM"
    hf_defaults = {"norm_topk_prob": False}
    fixed = FIXED
    derives_head_dim = False
