"""Graphs as pictures: Mermaid and DOT as text for other programs, SVG with our own layout."""
