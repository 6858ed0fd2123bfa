"""The gated delta rule with a decay for every key channel."""
