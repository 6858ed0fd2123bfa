"""Shuffled rows."""

from typing import Any

import numpy as np

from drawloom.components.data.order.shuffled import Shuffled
from drawloom.components.ports.data import RowSource


def test_sources_and_epochs_have_orders_of_their_own(job: Any) -> None:
    """Two sources with as many rows, and two epochs of one, come in four orders."""
    order = Shuffled(job=job)
    sources = [RowSource(name, 0, 30, 30, 1.0) for name in ("a", "b")]
    distinct_orders = {
        tuple(order.rows_at(source, epoch, np.arange(30)).tolist()) for source in sources for epoch in (0, 1)
    }
    assert len(distinct_orders) == 4
