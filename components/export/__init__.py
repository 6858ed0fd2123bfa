"""Export of a trained model as a Hugging Face folder."""
