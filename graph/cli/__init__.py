"""The command line: commands, exit codes, and the project of the commands."""
