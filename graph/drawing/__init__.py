"""Graphs as pictures: Mermaid and DOT as text for other programs, SVG by a layout of our own."""
