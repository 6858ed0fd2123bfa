"""Exports a trained model as a Hugging Face folder."""
