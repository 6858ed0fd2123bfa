"""Export from a trained model to a Hugging Face folder."""
