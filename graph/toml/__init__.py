"""TOML: parse with limits and diagnostics, locate keys and values, and write."""
