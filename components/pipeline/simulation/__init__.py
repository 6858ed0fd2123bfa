"""Simulation of programs: time, memory, and timelines as SVG and text."""
