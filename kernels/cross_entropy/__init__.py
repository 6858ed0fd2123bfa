"""Cross entropy over a linear layer's logits."""
