"""Perplexity, a metric for drawloom."""
