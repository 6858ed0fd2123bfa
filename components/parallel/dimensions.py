"""All mesh dimensions, outermost first; ranks along inner dimensions are neighbours."""

from drawloom.components.parallel.context import ContextDimension
from drawloom.components.parallel.data_replicate import DataReplicateDimension
from drawloom.components.parallel.data_shard import DataShardDimension
from drawloom.components.parallel.dimension import Dimension
from drawloom.components.parallel.expert import ExpertDimension
from drawloom.components.parallel.pipeline import PipelineDimension
from drawloom.components.parallel.tensor import TensorDimension

DIMENSIONS: tuple[type[Dimension], ...] = (
    PipelineDimension,
    ExpertDimension,
    DataReplicateDimension,
    DataShardDimension,
    ContextDimension,
    TensorDimension,
)
