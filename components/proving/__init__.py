"""Proof that a component is right on every mesh: a tool for `drawloom prove`, which no run imports."""
