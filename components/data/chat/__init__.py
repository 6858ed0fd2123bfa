"""Conversations as token ids: chat templates, trained turns, and the span of each turn in the rendered text."""
