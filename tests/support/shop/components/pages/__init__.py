"""Some pages."""
