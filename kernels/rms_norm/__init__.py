"""RMSNorm, alone or after an addition."""
