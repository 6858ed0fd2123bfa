"""The command line: commands, exit codes, and the project that they work on."""
