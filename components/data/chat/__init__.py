"""Conversations as token ids: chat templates, trained turns, and their spans in the rendered text."""
