"""What is left is pruned, placed on devices and compiled."""
