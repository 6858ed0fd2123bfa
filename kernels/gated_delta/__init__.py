"""Recurrent layers: the gated delta rule, and the convolution before it."""
