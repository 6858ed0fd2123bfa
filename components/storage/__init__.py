"""Files and folders that are whole or absent, hashed, and read with suspicion."""
