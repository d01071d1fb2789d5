"""The command `autodist`: one file for each of its commands, and their shared code."""
