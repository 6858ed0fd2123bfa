"""Model families beside transformers: numbers, and files in both directions."""

import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.model import KeyValueCache, LayerRange, TokenContext
from drawloom.components.ports.weights import Mapper
from drawloom.components.weights.load import convert_tensors, persistent_tensors
from support.adapted import OneStage, adapt, lora
from support.qwen3 import (
    SIZES,
    as_in_transformers,
    cpu_kernels,
    logits_of,
    losses_of,
    one_document,
    pack_documents,
    twin,
    whole,
)
from support.weight_folders import fill_module_from_folder

CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def small(kind: type[DecoderBuilder], **changes: Any) -> DecoderBuilder:
    """Return a small model of a family, with changed sizes."""
    return kind(**({"kernels": cpu_kernels()} | SIZES | changes))


def load_twin_from_files(model: DecoderBuilder, module: nn.Module) -> Any:
    """Return transformers' model of our files, for families with other tensors in files than in its modules."""
    from transformers import AutoModelForCausalLM

    kinds: Any = AutoModelForCausalLM
    with TemporaryDirectory() as folder:
        write_hugging_face_folder(Path(folder), model, OneStage(module))
        plain = {"attn_implementation": "eager", "experts_implementation": "eager", "pad_token_id": None}
        return kinds.from_pretrained(folder, dtype=torch.float32, **plain)


def as_in_files(model: DecoderBuilder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of parameters, of any shape, under their names and in their forms in files."""
    groups = model.hugging_face_mapper().groups
    return convert_tensors(Mapper(tuple(group for group in groups if set(group.inputs) <= tensors.keys())), tensors)


def assert_equal_to_transformers(
    model: DecoderBuilder, length: int = 19, by_files: Callable[[str], str] | None = None, without_gradient: str = ""
) -> None:
    """
    Assert that logits, losses over packed documents, and every parameter's gradient equal transformers'.

    With `by_files` weights and gradients are compared as tensors in files, which transformers converts; it maps the
    names that transformers saves to published ones. Parameters `without_gradient` (fnmatch) are skipped.
    """
    torch.manual_seed(0)
    module = whole(model)
    reference = load_twin_from_files(model, module) if by_files else twin(model, persistent_tensors(module))
    tokens, targets = torch.randint(model.vocab_size, (2, 2, length))
    targets[0, 3] = IGNORE_INDEX
    logits = logits_of(module, tokens, one_document(2, length))
    torch.testing.assert_close(logits, reference(tokens).logits, **CLOSE)
    lengths = [[length], [7, length - 7]]
    rows = [
        reference(part[None]).logits[0] for row, ends in zip(tokens, lengths, strict=True) for part in row.split(ends)
    ]
    wanted = F.cross_entropy(torch.cat(rows), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    losses = losses_of(module, tokens, pack_documents(lengths), targets)
    torch.testing.assert_close(losses.flatten(), wanted, **CLOSE)
    ours, reference_parameters = (
        {name: x for name, x in part.named_parameters() if not fnmatchcase(name, without_gradient)}
        for part in (module, reference)
    )
    grads = dict(zip(ours, gradients(losses.sum(), ours), strict=True))
    theirs = dict(zip(reference_parameters, gradients(wanted.sum(), reference_parameters), strict=True))
    if by_files:
        from transformers.core_model_loading import revert_weight_conversion

        grads, saved = as_in_files(model, grads), revert_weight_conversion(reference, theirs)
        theirs = {by_files(name): grad for name, grad in saved.items()}
    else:
        grads = as_in_transformers(model, grads, theirs)
    assert grads.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert bool(expected.any()), name
        size = max(1.0, float(expected.abs().max()))  # sums of many terms round by their size
        torch.testing.assert_close(grads[name] / size, expected / size, **CLOSE)


def gradients(total: Tensor, parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
    """Return the gradients of a loss () with respect to parameters of any shape."""
    return torch.autograd.grad(total, list(parameters.values()))


def assert_generated_as_whole_texts(model: DecoderBuilder, length: int = 11) -> None:
    """Assert that the logits of a text computed in parts, with a cache, equal the logits of the whole text."""
    torch.manual_seed(0)
    module, tokens = whole(model), torch.randint(model.vocab_size, (2, length))
    cache, parts = KeyValueCache(length), []
    with torch.no_grad():
        for part in (slice(0, 4), slice(4, 6), *(slice(n, n + 1) for n in range(6, length))):
            positions = torch.arange(length).expand(2, -1)[:, part]
            shared = TokenContext(positions, torch.zeros_like(positions), cache=cache)
            parts.append(logits_of(module, tokens[:, part], shared))
            cache.end_pass(positions.shape[1])
        torch.testing.assert_close(torch.cat(parts, 1), logits_of(module, tokens, one_document(2, length)), **CLOSE)


def assert_operations_equal_the_count_of_torch(model: DecoderBuilder, experts: float = 0.0) -> None:
    """
    Assert that FLOPs of a forward and a backward pass equal torch's count, where plain attention sees all pairs.

    `experts` are the FLOPs of experts in the forward pass over 22 tokens, which torch does not count.
    """
    module, tokens = whole(model), torch.randint(model.vocab_size, (2, 11))
    counter: Any = FlopCounterMode(display=False)
    # torch does not count its fused attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), counter:
        logits_of(module, tokens, one_document(2, 11)).sum().backward()
    flops = model.forward_flops()
    assert (
        flops.count_training_flops(22, dict.fromkeys(flops.per_pair, 2 * 11 * 11))
        == counter.get_total_flops() + 3 * experts
    )


def assert_all_projections_are_adapted(model: DecoderBuilder) -> None:
    """LoRA adapts the linear layers inside of layers by their names in transformers."""
    module = whole(model)
    theirs = twin(model, persistent_tensors(module))
    names = {name for name, layer in theirs.named_modules() if isinstance(layer, nn.Linear) and "_proj" in name}
    trained = {name for name, part in adapt(model, lora(*sorted(names))).named_parameters() if part.requires_grad}
    assert trained >= {f"{name}.lora_{factor}" for name in names for factor in "AB"}


def assert_files_go_both_ways(model: DecoderBuilder, folder: Path, by_files: bool = False) -> None:
    """
    Assert that files saved by transformers load as the same model, and that transformers loads our exports.

    With `by_files` transformers gets its weights from our files.
    """
    from transformers import AutoModelForCausalLM

    kinds: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    module = whole(model)
    reference = load_twin_from_files(model, module) if by_files else twin(model, persistent_tensors(module))
    reference.save_pretrained(folder / "theirs")
    read = type(model)(kernels=cpu_kernels(), config=folder / "theirs")
    assert read.architecture == model.architecture, json.loads((folder / "theirs/config.json").read_text())
    again = read.build(LayerRange.of_whole_model(read.num_hidden_layers))
    fill_module_from_folder(folder / "theirs", again, read.hugging_face_mapper().inverse())
    write_hugging_face_folder(folder / "ours", read, OneStage(again))
    loaded = kinds.from_pretrained(folder / "ours", attn_implementation="eager")
    tokens = torch.randint(model.vocab_size, (2, 11))
    logits = logits_of(module, tokens, one_document(2, 11))
    torch.testing.assert_close(logits_of(again, tokens, one_document(2, 11)), logits)
    torch.testing.assert_close(loaded(tokens).logits, logits, **CLOSE)
