"""Programs run on paper: time, memory, and timelines as pictures and text."""
