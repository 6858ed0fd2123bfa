"""GPU kernels and their eager twins. They know torch and triton, and nothing of recipes."""
