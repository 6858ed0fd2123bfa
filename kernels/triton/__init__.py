"""The operations in Triton, which is imported with any of these modules and nowhere else."""
