"""What ports promise of behaviour: one module for each module of ports, one function for each property."""

FRAMEWORK_ONLY = {
    "Timed": "it changes the timeouts of process groups, and ends processes: only what makes these can implement it",
}
"""Ports without a contract, which no plugin implements, and why."""
