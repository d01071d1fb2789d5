"""What workers send each other: all-reduce, parameter servers, copies, and at which pace."""
