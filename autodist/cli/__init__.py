"""The command `autodist`: a file for each of its commands, and what they share."""
