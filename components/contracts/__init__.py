"""What ports promise of behaviour: one module for each port, one property for each function."""
