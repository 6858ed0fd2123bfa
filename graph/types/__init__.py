"""Types of settings and ports: values converted to them, their names in messages, and whether classes match."""
