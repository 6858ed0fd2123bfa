"""Lookup, by port, of a recipe's nodes for a plan."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs

from drawloom import Recipe, UserError
from drawloom.components.distributed.planned import PlannedMesh
from drawloom.graph.wiring.graph import Graph
from drawloom.ports import (
    Batch,
    Batching,
    Collator,
    CountsFlops,
    FrozenModel,
    HostMemoryUser,
    KnownDocuments,
    MakesRows,
    MemoryPolicy,
    MemoryUser,
    Mesh,
    PackedDataset,
    Phase,
    RowGrowth,
    Schedule,
    Stages,
    TokenCorpus,
    WritesBatches,
    choose_micro_size,
)

NO_GROWTH = RowGrowth(rows_per_row=1, added_tokens=0)


@attrs.frozen(eq=False)
class Nodes:
    """Names and settings of the nodes in a run of the recipe."""

    recipe: Recipe
    graph: Graph
    used: frozenset[str]

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "Nodes":
        """Return this recipe's nodes in a run; RecipeError if the recipe has errors."""
        graph = recipe.graph.require_valid()
        return cls(recipe, graph, frozenset(graph.topological_order([recipe.project.root])))

    def find_nodes(self, port: type) -> list[str]:
        """Return a port's nodes, without nodes unused in a run."""
        return [name for name in self.graph.implementers(port) if name in self.used]

    def find_only_node(self, port: type) -> str:
        """Return the node for a port; UserError if there is not exactly one."""
        names = self.find_nodes(port)
        if len(names) != 1:
            raise UserError(
                f"a plan needs exactly one node that implements {port.__name__}, and the recipe has {len(names)}", 2
            )
        return names[0]

    def settings(self, port: type) -> Mapping[str, Any]:
        """Return the settings of a port's only node; UserError if there is not exactly one."""
        return self.graph.nodes[self.find_only_node(port)].settings

    @cached_property
    def mesh_node(self) -> str:
        """The mesh's node."""
        return self.find_only_node(Mesh)

    @cached_property
    def model_node(self) -> str:
        """The stages' model node."""
        [edge] = self.graph.nodes[self.stages_node].edges["model"].targets
        return edge

    @property
    def has_experts(self) -> bool:
        """Return whether the model has experts, according to its node's settings."""
        return bool(self.graph.nodes[self.model_node].settings.get("num_experts"))

    @cached_property
    def schedule_node(self) -> str:
        """The schedule's node."""
        return self.find_only_node(Schedule)

    @cached_property
    def stages_node(self) -> str:
        """The stages' node."""
        return self.find_only_node(Stages)

    @property
    def frozen_models_with_flops(self) -> list[str]:
        """The frozen second models' nodes, if these models count their FLOPs."""
        names = [
            name for frozen in self.find_nodes(FrozenModel) for name in self.graph.nodes[frozen].edges["model"].targets
        ]
        return [name for name in names if name in self.graph.implementers(CountsFlops)]

    @property
    def lets_policy_place_optimizer_state(self) -> bool:
        """Return whether an optimizer lets the memory policy choose where its state is."""
        users = {
            user for name in self.find_nodes(MemoryPolicy) for user, _ in self.graph.list_users_with_edge_names(name)
        }
        return bool(users & {*self.streaming_optimizer_nodes})

    @property
    def streaming_optimizer_nodes(self) -> list[str]:
        """Return the nodes able to stream their state from host memory."""
        return self.find_nodes(HostMemoryUser)

    def has_feature(self, use: str) -> bool:
        """Return whether the run has the feature with this `use`."""
        return any(self.graph.nodes[name].spec.use == use for name in self.used)

    @property
    def may_offload_activations(self) -> bool:
        """Return whether activations can wait in host memory: not in CUDA graphs."""
        return not self.has_feature("pipeline.captured")

    @property
    def nodes_needed_by_stages(self) -> list[str]:
        """The nodes to which the stages and a frozen second model refer."""
        stages = [self.graph.nodes[name] for name in (self.stages_node, *self.find_nodes(FrozenModel))]
        return [*dict.fromkeys(name for node in stages for edge in node.edges.values() for name in edge.targets)]

    @property
    def tokenizer_nodes_to_omit(self) -> list[str]:
        """Return the tokenizer if only the model needs it and its settings already determine the vocabulary size."""
        edge = self.graph.nodes[self.model_node].edges.get("tokenizer")
        is_known = any(
            self.graph.nodes[self.model_node].settings.get(key) is not None for key in ("vocab_size", "config", "path")
        )
        if edge is None or not is_known:
            return []
        needed = {*self.graph.topological_order([*self.nodes_needed_by_stages, *self.find_nodes(MemoryUser)])}
        users = {user for name in edge.targets for user, _ in self.graph.list_users_with_edge_names(name)}
        return [*edge.targets] if users & needed == {self.model_node} else []

    @cached_property
    def phase_row_growth(self) -> RowGrowth:
        """Row growth by a phase, such as sampling; NO_GROWTH without such a phase."""
        for name in self.find_nodes(Phase):
            if issubclass(component := self.graph.nodes[name].spec.cls, MakesRows):
                return component.predict_row_growth(self.graph.view(name))
        return NO_GROWTH

    @property
    def batch_type(self) -> type[Batch]:
        """Return the run's batch class; UserError if there is not exactly one."""
        ports = (Phase,) if self.phase_row_growth != NO_GROWTH else (PackedDataset, Collator)
        classes = [self.graph.nodes[name].spec.cls for port in ports for name in self.find_nodes(port)]
        types = {cls.batch_type for cls in classes if isinstance(cls, WritesBatches) and cls.batch_type is not None}
        if len(types) != 1:
            raise UserError(f"a plan needs exactly one batch class, and the recipe's data sets have {len(types)}", 2)
        return types.pop()

    @property
    def sequence_length(self) -> int:
        """Return the sequence length, or 1 if rows are not tokens; UserError if no data set has it as a setting."""
        if "tokens" not in self.batch_type.specs.values():
            return 1
        for name in self.find_nodes(PackedDataset):
            for key in ("length", "max_length"):
                if isinstance(length := self.graph.nodes[name].settings.get(key), int):
                    return length + self.phase_row_growth.added_tokens
        text = "a plan needs the sequence length, and no data set of the recipe has a setting `length` or `max_length`"
        raise UserError(f"{text}; add one of them, an integer", 2)

    @property
    def mean_document_length(self) -> float:
        """Return the mean document length in tokens, or inf if the data are not available or do not know it."""
        names = self.find_nodes(TokenCorpus)
        if len(names) != 1 or not issubclass(self.graph.nodes[names[0]].spec.cls, KnownDocuments):
            return math.inf
        container = self.recipe.project.container(self.graph, *names)
        container.build()
        length: float | None = container[names[0]].compute_mean_document_length()
        return math.inf if length is None else length

    @property
    def global_batch_size(self) -> int:
        """Return the global batch size: rows of the data set in a step."""
        return int(self.settings(Batching)["global_size"])

    def count_rows_and_microbatches(self, mesh: PlannedMesh) -> tuple[int, int]:
        """Count a rank's rows per microbatch and microbatches per step; UserError if a step is not divisible."""
        limit = int(self.settings(Batching)["micro_size"])
        replicas = mesh.sizes.data_replicate * mesh.sizes.data_shard
        if self.global_batch_size % replicas:
            text = f"{self.global_batch_size} rows are not divisible among {replicas} replicas"
            raise UserError(f"batch.global_size: {text}; write a multiple of {replicas}", 2)
        rows = choose_micro_size([self.global_batch_size], limit, replicas)
        return rows * self.phase_row_growth.rows_per_row, self.global_batch_size // (rows * replicas)
