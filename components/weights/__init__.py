"""Tensors of a model between files and modules. A library: it holds no components."""
