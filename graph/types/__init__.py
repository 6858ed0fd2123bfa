"""The types of settings and ports: structured, described, compared."""
