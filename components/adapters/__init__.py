"""Adapters: LoRA, and full tuning of named parts of a model that is frozen otherwise."""
