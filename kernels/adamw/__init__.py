"""AdamW for weights and means of few bits."""
