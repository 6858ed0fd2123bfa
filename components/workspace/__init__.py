"""Exchange of tensors and configurations between ranks, through memory or a folder."""
