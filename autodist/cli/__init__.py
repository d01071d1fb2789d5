"""The command `autodist`: a file for each of its commands (diff stands beside plan), and their shared code."""
