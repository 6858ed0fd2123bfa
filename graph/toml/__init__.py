"""TOML text: parsed with limits and diagnoses, indexed by position, and written."""
