"""Every setting of every component has an effect: a changed value changes the component's behavior."""

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from tokenizers import Tokenizer as HuggingFace
from tokenizers import models, pre_tokenizers, trainers

from drawloom.components.pipeline.program.notation import format_program_csv
from drawloom.graph.problems import RecipeError, UserError
from drawloom.graph.project import Recipe
from drawloom.graph.registry.registry import Registry
from drawloom.graph.testing import build
from support import observers as parts
from support import observers_of_runs as runs
from support.chat import CHATML, say
from support.qwen3 import SIZES, SPARSE_SIZES
from support.setting_changes import (
    DELTA,
    INDEX_SIZES,
    LATENT_SIZES,
    LINEAR_SIZES,
    MAMBA_SIZES,
    ROWS,
    UNOBSERVED,
    Change,
    Observer,
)
from support.stores import store_of, write_dataset, write_megatron, write_table

REGISTRY = Registry.from_package("drawloom.components")


def settings() -> Iterator[tuple[str, str]]:
    """Yield every component's settings, and the keys of their tables."""
    for use in REGISTRY.names():
        spec = REGISTRY.require(use)
        for field in (field for field in spec.fields.values() if field.kind == "setting"):
            yield use, field.name
            yield from ((use, f"{field.name}.{key}") for key in _keys(field.type))


def _keys(kind: Any) -> list[str]:
    """Return the keys of a table, or of the tables in a list."""
    own = [field.name for field in attrs.fields(kind)] if attrs.has(kind) else []
    return own + [key for part in typing.get_args(kind) for key in _keys(part)]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files named by settings."""
    folder = tmp_path_factory.mktemp("samples")
    (folder / "texts").mkdir()
    for number in range(20):
        (folder / "texts" / f"{number}.txt").write_text(f"text {number}", "utf-8")
    (folder / "latin.txt").write_bytes(b"na\xefve")
    for name in ("one", "other"):
        lines = [json.dumps({"text": f"{name} {number}", "other": f"else {number}"}) for number in range(20)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), "utf-8")
        ids = [json.dumps({"input_ids": [number, len(name)]}) for number in range(20)]
        (folder / f"{name}.ids").write_text("\n".join(ids), "utf-8")
        write_table(folder / f"{name}.parquet", f"{name}", 20)
        write_dataset(folder / f"{name}_dataset", name)
        write_megatron(folder / f"{name}_megatron", [[*name.encode(), number] for number in range(20)])
        store_of(folder / f"{name}_store", [[f"{name} {number}" for number in range(20)]])
        rows = [json.dumps({"messages": say("a", f"{name} {n}", "b", "c")}) for n in range(9)]
        (folder / f"{name}.chat").write_text("\n".join(rows), "utf-8")
        pairs = [json.dumps({"prompt": f"{name} {n}", "chosen": "b", "rejected": "c"}) for n in range(9)]
        pairs.append(json.dumps({"prompt": say("a"), "chosen": say("a", "b")[1:], "rejected": say("a", name)[1:]}))
        (folder / f"{name}.pairs").write_text("\n".join(pairs), "utf-8")
        answers = [say(f"a {n}", f"{name} {n}") for n in range(9)]
        judged = [{"prompt": turns[:1], "completion": turns[1:], "label": n > 4} for n, turns in enumerate(answers)]
        (folder / f"{name}.judged").write_text("\n".join(map(json.dumps, judged)), "utf-8")
        labelled = [{"messages": say(f"{name} {n}"), "label": ("yes", "no")[n % 2]} for n in range(9)]
        (folder / f"{name}.labelled").write_text("\n".join(map(json.dumps, labelled)), "utf-8")
        (folder / f"{name}.jinja").write_text(("{{ strftime_now('%Y') }}" if name == "other" else "") + CHATML, "utf-8")
        _write_tokenizer(folder / f"{name}_tokenizer.json", "the quick fox" if name == "one" else "thequick")
        schedule = build("pipeline.schedules.gpipe" if name == "one" else "pipeline.schedules.one_f_one_b")
        (folder / f"{name}.csv").write_text(format_program_csv(schedule.program(4, 8)))
        families = [(SIZES, "qwen3.dense", ""), (SPARSE_SIZES, "qwen3.moe", "_moe")]
        families += [(SPARSE_SIZES, family, f"_{family}") for family in ("dots1", "glm4_moe")]
        families += [(LATENT_SIZES, family, f"_{family}") for family in LATENT_FAMILIES]
        sparse = SIZES | {"num_experts": 5, "num_experts_per_tok": 2}
        families += [(sparse, family, f"_{family}") for family in ("gpt_oss", "minimax_m2")]
        families += [(SIZES | {"global_head_dim": 12}, "gemma4", "_gemma4")]
        families += [(SIZES | DELTA, family, f"_{family}") for family in ("qwen3_5", "olmo_hybrid")]
        families += [(SIZES | DELTA | {"layers": "gdn"}, "pattern", "_pattern")]
        families += [(LATENT_SIZES | LINEAR_SIZES, "kimi_linear", "_kimi_linear")]
        families += [(LATENT_SIZES | INDEX_SIZES, family, f"_{family}") for family in ("deepseek_v32", "glm_moe_dsa")]
        families += [(SPARSE_SIZES | MAMBA_SIZES, "nemotron_h", "_nemotron_h")]
        families += [(SPARSE_SIZES | DELTA, family, f"_{family}") for family in ("qwen3_5_moe", "qwen3_next")]
        families += [(SIZES, family, f"_{family}") for family in DENSE_FAMILIES]
        for sizes, use, suffix in families:
            config = parts.config_of(f"model.{use}", sizes | ({"hidden_size": 32} if name == "other" else {}), folder)
            (folder / f"{name}{suffix}.json").write_text(json.dumps(config))
    run = {"name": "small", "folder": str(folder / "run"), "seed": 5}
    with Recipe.load("first_run").with_values({"model": runs.TINY, "run": run}).open(only="export") as objects:
        objects["export"].run_after_training(1)
    (folder / "run" / "export").rename(folder / "exported")
    return folder


def _write_tokenizer(path: Path, text: str) -> None:
    tokenizer = HuggingFace(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text] * 9, trainers.BpeTrainer(special_tokens=["<a>", "<b>"], initial_alphabet=alphabet)
    )
    tokenizer.save(str(path))


DENSE_FAMILIES = ("gemma3", "granite", "lfm2", "llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "smollm3")
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


@attrs.frozen
class Refusal:
    """A refusal of values, with its message."""

    text: str


def observe(observer: Observer, use: str, values: dict[str, Any], folder: Path) -> Any:
    """Create a folder, and return the observation or the refusal in it."""
    folder.mkdir()
    try:
        return observer(use, values, folder)
    except (RecipeError, UserError) as error:
        return Refusal(str(error))


_before: dict[str, Any] = {}
"""Observations before a change, cached because many settings share them."""


def _observe_before(observer: Observer, use: str, values: dict[str, Any], folder: Path) -> Any:
    component = f"{observer.__name__} {use}"
    key = f"{component} {values}"
    if key not in _before:
        before = observe(observer, use, values, folder / "before")
        assert not isinstance(before, Refusal), before
        if component not in _before:  # observations that vary by themselves would differ after any change
            assert before == observe(observer, use, values, folder / "again"), "two observations of one are different"
        _before[component] = _before[key] = before
    return _before[key]


OBSERVED = sorted(set(settings()) - UNOBSERVED.keys())


@pytest.mark.parametrize("use", sorted({use for use, _ in OBSERVED}))
def test_changed_settings_have_effects(
    use: str, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another value of any of its settings, a component behaves differently."""
    monkeypatch.chdir(samples)
    for name in (name for component, name in OBSERVED if component == use):
        hint = f"write in ROWS how a change of {name!r} of {use!r} is observed"
        assert use in ROWS and name in ROWS[use].changes, hint
        folder, row = tmp_path / name, ROWS[use]
        folder.mkdir()
        change = row.changes[name] if isinstance(row.changes[name], Change) else Change(row.changes[name])
        values = {key: value for key, value in (row.base | change.given).items() if value is not None}
        observer = change.observer or row.observer
        before = _observe_before(observer, use, values, folder)
        after = observe(observer, use, values | {name.partition(".")[0]: change.value}, folder / "after")
        assert before != after, f"{name} = {change.value!r} in {use!r} changes nothing"
        assert isinstance(after, Refusal) == change.refused, f"{name} in {use!r}: {after}"


def test_tables_name_only_existing_settings() -> None:
    """Every row names an existing setting, and every exception has a reason."""
    named = {(use, name) for use, row in ROWS.items() for name in row.changes}
    assert named | UNOBSERVED.keys() == set(settings()) and not named & UNOBSERVED.keys()
    assert all(len(reason) > 20 for reason in UNOBSERVED.values())
