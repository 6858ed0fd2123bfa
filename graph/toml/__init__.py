"""TOML: parsing with limits and diagnostics, positions of keys and values, and writing."""
