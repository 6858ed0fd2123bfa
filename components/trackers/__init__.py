"""Where a run's metrics are written down."""
