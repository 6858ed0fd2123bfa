"""AdamW for weights and means with few bits."""
