"""What `autodist trace` makes of the traces that workers have written."""
