"""Families of models beside transformers: numbers, and files in both directions."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from drawloom.components.export.hf_writer import write_folder
from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.model import LayerRange
from drawloom.components.weights.load import load_folder, persistent_tensors
from support.adapted import OneStage
from support.qwen3 import SIZES, cpu_kernels, logits_of, losses_of, one_document, pack_documents, twin, whole

CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def small(kind: type[DecoderBuilder], **changes: Any) -> DecoderBuilder:
    """A small model of a family, with other sizes if given."""
    return kind(**({"kernels": cpu_kernels()} | SIZES | changes))


def assert_equal_to_transformers(model: DecoderBuilder, length: int = 19) -> None:
    """Logits, losses of packed documents, and the gradient of every parameter are those of transformers."""
    torch.manual_seed(0)
    module = whole(model)
    theirs = twin(model, persistent_tensors(module))
    tokens, targets = torch.randint(model.vocab_size, (2, 2, length))
    targets[0, 3] = IGNORE_INDEX
    logits = logits_of(module, tokens, one_document(2, length))
    torch.testing.assert_close(logits, theirs(tokens).logits, **CLOSE)
    lengths = [[length], [7, length - 7]]
    rows = [theirs(part[None]).logits[0] for row, ends in zip(tokens, lengths, strict=True) for part in row.split(ends)]
    wanted = F.cross_entropy(torch.cat(rows), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    losses = losses_of(module, tokens, pack_documents(lengths), targets)
    torch.testing.assert_close(losses.flatten(), wanted, **CLOSE)
    ours, others = dict(module.named_parameters()), dict(theirs.named_parameters())
    assert ours.keys() == others.keys()
    grads = torch.autograd.grad(losses.sum(), list(ours.values()))
    for name, grad, other in zip(
        ours, grads, torch.autograd.grad(wanted.sum(), [others[name] for name in ours]), strict=True
    ):
        assert bool(other.any()), name
        size = max(1.0, float(other.abs().max()))  # sums of many terms round by their size
        torch.testing.assert_close(grad / size, other / size, **CLOSE)


def assert_files_go_both_ways(model: DecoderBuilder, folder: Path) -> None:
    """What transformers saves is read as the same model, and what is exported transformers loads as the same."""
    from transformers import AutoModelForCausalLM

    kinds: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    module = whole(model)
    theirs = twin(model, persistent_tensors(module))
    theirs.save_pretrained(folder / "theirs")
    read = type(model)(kernels=cpu_kernels(), config=folder / "theirs")
    assert read.architecture == model.architecture, json.loads((folder / "theirs/config.json").read_text())
    again = read.build(LayerRange(0, read.num_hidden_layers, embedding=True, head=True))
    load_folder(folder / "theirs", again, read.hugging_face_mapper().inverse())
    write_folder(folder / "ours", read, OneStage(again))
    loaded = kinds.from_pretrained(folder / "ours", attn_implementation="eager")
    tokens = torch.randint(model.vocab_size, (2, 11))
    logits = logits_of(module, tokens, one_document(2, 11))
    torch.testing.assert_close(logits_of(again, tokens, one_document(2, 11)), logits)
    torch.testing.assert_close(loaded(tokens).logits, logits, **CLOSE)
