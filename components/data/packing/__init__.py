"""Packing: the index that assigns parts of documents to rows."""
