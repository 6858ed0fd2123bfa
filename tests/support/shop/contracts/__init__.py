"""What the shop's ports promise of behaviour."""
