"""Adapters for frozen models: LoRA, and full fine-tuning of named parts."""
