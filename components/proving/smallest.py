"""The smallest recipe with a component, and smallest sizes for other recipes."""

import json
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drawloom import Recipe
from drawloom.components.phases.report import Report
from drawloom.components.storage.safetensors.writer import write_safetensors_file
from drawloom.components.weights.load import convert_tensors, persistent_tensors
from drawloom.graph.recipe.overrides import nest_values
from drawloom.graph.registry.registry import Spec
from drawloom.graph.types.port_match import implements
from drawloom.graph.wiring.graph import Graph
from drawloom.ports import (
    Adapter,
    Batching,
    Corpus,
    Device,
    Dispatcher,
    FinalTask,
    Kernels,
    LayerRange,
    Listener,
    Loss,
    Mesh,
    Metric,
    Model,
    ModelExport,
    ModelWithoutExport,
    PackedDataset,
    PassFeature,
    Phase,
    Precision,
    Processes,
    ReadsLeaves,
    Restorer,
    RowOrder,
    Schedule,
    Settings,
    StageFeature,
    Stager,
    TokenBatch,
    TokenCorpus,
    Tokenizer,
    Tracker,
    WritesBatches,
    uses_preference_pairs,
    uses_unpaired_answers,
)

VALUES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("smallest.toml").read_text("utf-8"))
SIZES, NARROW, FLOAT64, DENSE, BASE_VALUES = map(VALUES.__getitem__, ("sizes", "narrow", "float64", "dense", "base"))
EXPERTS = DENSE | VALUES["experts"]
BASE_VALUES["model"] = EXPERTS
CONFIG = {name: value for name, value in DENSE.items() if name != "use"} | VALUES["config"]
GENERATED, STEPS = BASE_VALUES["packing"], BASE_VALUES["trainer"]["steps"]
LENGTH = GENERATED["length"]
BASE = "pretrain"
TIMED = ("throughput", "utilization", "memory", "phase_times", "recovery")
"""Metrics of the machine, which differ between two runs."""
LEAVES = {"tokens", "targets", "positions", "document_ids", "weights", "padding"}
"""Leaves of the generated rows."""


REWARD = "rewards.proved"


def make_reward_values(spec: Spec, folder: Path) -> dict[str, Any]:
    """Return values for the recipe `grpo` with a reward as `REWARD`; a model's config is written into the folder."""
    return {
        "unset": ["rewards.exact_match"],
        "vars": {"base": str(write_config(CONFIG, folder / "base"))},
        "tokenizer": {"use": "data.bytes"},
        **nest_values(REWARD, {"use": spec.use, **_select_required_settings(spec)}),
    }


def _select_required_settings(spec: Spec) -> dict[str, Any]:
    return {
        name: value for name, value in VALUES["required"].items() if name in spec.fields and spec.fields[name].required
    }


def make_component_recipe(
    spec: Spec, node: str, changes: Mapping[str, Any], folder: Path, key_heads: int
) -> dict[str, Any]:
    """Return values for `BASE` with a component as a node, and with changes. A corpus is written into the folder."""
    names = {field.name for field in spec.settings}
    settings = _select_required_settings(spec)
    if implements(spec.cls, Model):
        settings |= {name: SIZES[name] for name in list(SIZES)[: list(SIZES).index("global_size")] if name in names}
        settings |= {"num_key_value_heads": key_heads} if "num_key_value_heads" in names else {}
        settings |= {name: value for name, value in VALUES["model_settings"].items() if name in names}
        if {"path", "weights"} <= names:
            settings |= {"path": str(write_config(CONFIG, folder)), "weights": False}
        if issubclass(spec.cls, ModelWithoutExport):
            changes = {"unset": [*BASE_VALUES["unset"], "export"], "trainer": {"on_finish": []}}
    values = merge_values(merge_values(BASE_VALUES, changes), nest_values(node, {"use": spec.use, **settings}))
    if any(implements(spec.cls, port) for port in (Corpus, TokenCorpus, Tokenizer, PackedDataset)):
        return _add_texts(values, node, folder)
    return values


def find_node_and_changes(spec: Spec) -> tuple[str, dict[str, Any]] | None:
    """Return a component's node in the smallest recipe, and what else the recipe needs; None without a place there."""
    cls, flow = spec.cls, spec.traits.flow
    if implements(cls, Phase):
        if node := next((node for value, node in VALUES["replaced_phases"].items() if value in flow.writes), ""):
            return node, {}
        after = {"remove": "@garbage_collection", "after": {"@optimizer": "@proved"}}
        return ("clip", {}) if "gradients" in flow.changes else ("proved", {"edit": {"trainer": {"phases": after}}})
    for port, node in POSITIONS.items():
        if implements(cls, port):
            return node, EDGES.get(port, {})
    return ("proved", {}) if issubclass(cls, StageFeature | PassFeature) else None


POSITIONS: dict[Any, str] = {
    Loss: "loss",
    Model: "model",
    Schedule: "schedule",
    Dispatcher: "dispatcher",
    Metric: "metrics.proved",
    Adapter: "adapter",
    Kernels: "kernels",
    PackedDataset: "packing",
    RowOrder: "order",
    Tokenizer: "tokenizer",
    TokenCorpus: "tokens",
    Corpus: "corpus",
    Stager: "staging",
    ModelExport: "export",
    Tracker: "trackers.proved",
    Listener: "listeners.proved",
    FinalTask: "proved",
}
"""Nodes by port, most likely first."""
EDGES: dict[Any, dict[str, Any]] = {
    Model: {"model": {}},
    Dispatcher: {"stages": {"dispatcher": "@dispatcher"}},
    Adapter: {"stages": {"adapters": ["@adapter"]}},
    FinalTask: {"trainer": {"on_finish": ["@export", "@proved"]}},
}
"""Values that connect these nodes."""


def _add_texts(values: dict[str, Any], node: str, folder: Path) -> dict[str, Any]:
    """Return the recipe with texts of odd lengths, and a packing with padding."""
    folder.mkdir(exist_ok=True)
    for number in range(120):
        (folder / f"{number:03}.txt").write_text("abcdefghijklmnopqrs"[: 3 + number % 8 * 2], "utf-8")
    texts = {"use": "data.text_files", "paths": [str(folder / "*.txt")], "validation_fraction": 0.2}
    others = {
        "corpus": texts,
        "tokens": {"use": "data.tokenized_text"},
        "packing": {"use": "data.packing.first_fit", "length": LENGTH},
    }
    values = merge_values(values, {name: table for name, table in others.items() if name != node})
    if node == "packing":
        values = merge_values(values, {node: {"length": LENGTH}})
    return {**values, "unset": values["unset"][1:]}


def shrink_recipe(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return values for the smallest sizes, and for generated rows if the loss reads only tokens."""
    graph = recipe.graph
    values: dict[str, Any] = {}
    for name, node in graph.nodes.items():
        small = dict(_iterate_small_settings(node.settings, folder))
        if "path" in small and node.settings.get("weights"):
            _write_random_weights(node.spec.cls, Path(small["path"]))
        if implements(node.spec.cls, Restorer):
            small["keep"] = 9
        values = merge_values(values, nest_values(name, small))
    root = graph.nodes[recipe.project.root]
    exports = set(graph.implementers(ModelExport))
    tasks = root.edges["on_finish"].targets if "on_finish" in root.edges else ()
    values = merge_values(
        values, nest_values(root.name, {"steps": STEPS, "on_finish": [f"@{n}" for n in tasks if n in exports]})
    )
    if _can_use_generated_rows(graph):
        [packing] = graph.implementers(PackedDataset)
        values = merge_values(values, {packing: GENERATED})
        for order in graph.implementers(RowOrder):
            values = merge_values(values, {order: {"use": "data.order.sequential"}})
    return values


def make_reproducible_values(graph: Graph) -> dict[str, Any]:
    """Return values for a proof's runs: on the CPU, in float64, and without measurements of time."""
    values: dict[str, Any] = {name: {"kind": "cpu"} for name in graph.implementers(Device)}
    values |= {name: {"timeout": 60.0} for name in graph.implementers(Processes)}
    values |= dict.fromkeys(graph.implementers(Precision), FLOAT64)
    values |= {name: {"data_replicate": 1} for name in graph.implementers(Mesh)}
    for name, node in graph.nodes.items():
        if node.spec.cls is Report:
            metrics = node.edges["metrics"].targets if "metrics" in node.edges else ()
            kept = [f"@{metric}" for metric in metrics if graph.nodes[metric].spec.use.split(".")[-1] not in TIMED]
            values[name] = {"metrics": kept, "every": "never"}
    for name in graph.implementers(Restorer):
        values[name] = {"every": STEPS // 2, "keep": 9}
    return values


def list_smaller_values(recipe: Recipe, step: int) -> list[dict[str, Any]]:
    """Return changes towards a smaller recipe, to be tried one after another; `step` is the first failing one."""
    graph, root = recipe.graph, recipe.project.root
    models = graph.implementers(Model)
    return [
        *(
            {name: {"num_hidden_layers": layers, **_select_dense_layers(graph, name, layers)}}
            for name in models
            for layers in (2, 1)
        ),
        *({name: {"global_size": 4}} for name in graph.implementers(Batching)),
        {root: {"steps": step, "on_finish": []}},
    ]


def _select_dense_layers(graph: Graph, model: str, layers: int) -> dict[str, Any]:
    """Return the setting for layers without experts, cut to a number of layers, if the model has it."""
    dense = graph.nodes[model].settings.get("mlp_only_layers")
    return {"mlp_only_layers": [layer for layer in dense if layer < layers - 1]} if dense else {}


def _iterate_small_settings(settings: Settings, folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield smaller values; a model's config is written into the folder, with smaller sizes."""
    for name, value in settings.items():
        if type(value) is int and value > SIZES.get(name, value):
            heads = settings.get("num_attention_heads")
            yield name, SIZES["num_attention_heads" if name == "num_key_value_heads" and value == heads else name]
        elif value is None and name.startswith("linear_") and name in SIZES:  # defaults are far larger
            yield name, SIZES[name]
        elif name == "every" and value != "never":
            yield name, STEPS // 2
        elif name == "layer_types" and isinstance(value, list):
            kinds = [*dict.fromkeys(value)]
            yield name, [kinds[layer % len(kinds)] for layer in range(SIZES["num_hidden_layers"])]
        elif name == "mlp_only_layers" and isinstance(value, list):
            yield name, [layer for layer in value if layer < SIZES["num_hidden_layers"]]
        elif (file := _find_config(value)) is not None:
            config = json.loads(file.read_text("utf-8"))
            copy = folder / file.parent.resolve().relative_to("/")  # for all nodes that name the folder
            write_config(config | dict(_iterate_small_settings(config, folder)), copy)
            for pattern in ("*token*", "*.jinja"):
                for tokens in file.parent.glob(pattern):
                    shutil.copy(tokens, copy)
            yield name, str(copy)


def _write_random_weights(cls: Any, folder: Path) -> None:
    """Write weights for a model with the class and the config in the folder, as for a teacher, who needs some."""
    model = cls(kernels=None, path=folder, weights=False)
    module = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
    for tensor in persistent_tensors(module).values():
        tensor.detach().normal_(float(tensor.ndim == 1), 0.2)  # around 1 in norms
    tensors = convert_tensors(model.hugging_face_mapper(), persistent_tensors(module))
    write_safetensors_file(folder / "model.safetensors", tensors)


def write_config(config: Mapping[str, Any], folder: Path) -> Path:
    """Write a model's config into a new folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _find_config(value: Any) -> Path | None:
    """Return the config.json named by a setting, itself or by its folder."""
    if not isinstance(value, str | Path):
        return None
    path = Path(value)
    return next((file for file in (path, path / "config.json") if file.name == "config.json" and file.is_file()), None)


def _can_use_generated_rows(graph: Graph) -> bool:
    """
    Return whether `proving.rows` can replace the only dataset: it makes token batches, and the loss reads no other
    leaves.
    """
    packings, losses = graph.implementers(PackedDataset), graph.implementers(Loss)
    # An installed package's dataset is kept: components outside of drawloom are the ones to prove.
    if len(packings) != 1 or len(losses) != 1 or graph.nodes[packings[0]].spec.distribution:
        return False
    dataset_class, loss_class = graph.nodes[packings[0]].spec.cls, graph.nodes[losses[0]].spec.cls
    makes_tokens = isinstance(dataset_class, WritesBatches) and dataset_class.batch_type is TokenBatch
    reads = set(loss_class.batch_leaves) if isinstance(loss_class, ReadsLeaves) else {"unknown"}
    reads_pairs = uses_preference_pairs(loss_class) or uses_unpaired_answers(loss_class)
    return makes_tokens and reads <= LEAVES and not reads_pairs


def merge_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables; a table with another `use`, or an empty one, replaces the first."""
    merged = dict(one)
    for key, value in other.items():
        mine = merged.get(key)
        if (
            isinstance(value, dict)
            and isinstance(mine, dict)
            and value
            and mine.get("use") == value.get("use", mine.get("use"))
        ):
            merged[key] = merge_values(mine, value)
        else:
            merged[key] = value
    return merged
