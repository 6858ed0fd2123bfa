"""Context parallelism: every row's tokens are partitioned over ranks; `context_part.py` divides them."""

from typing import ClassVar

import attrs
from torch import nn

from drawloom.components.parallel.dimension import Dimension
from drawloom.ports import RankSlice


@attrs.define(eq=False)
class ContextDimension(Dimension):
    """Ranks with other tokens of the same rows; FSDP shards parameters over them too (`fsdp.py`)."""

    name: ClassVar[str] = "context"
    splits_work: ClassVar[bool] = True

    def apply_to_meta_module(self, module: nn.Module) -> dict[str, RankSlice]:
        """Set this rank's context group on modules with sums over whole rows; no parameter is split."""
        if self.mesh.context_group.size > 1:
            from drawloom.components.parallel.row_sums import set_context_group

            set_context_group(module, self.mesh.context_group)
        return {}
