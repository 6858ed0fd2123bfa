"""TOML text: where every key and value stands, how it is read, and how values are written."""
