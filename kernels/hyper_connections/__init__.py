"""Hyper-connections: a branch's weights to read, write and mix residual streams."""
