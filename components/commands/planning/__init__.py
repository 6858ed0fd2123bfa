"""Commands that plan, simulate and measure before a run."""
