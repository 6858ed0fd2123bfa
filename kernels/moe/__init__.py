"""Mixture of experts: routes, copies and sums of tokens."""
