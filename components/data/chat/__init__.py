"""Conversations as token ids: chat templates, which turns are trained, and what of a rendering belongs to a turn."""
