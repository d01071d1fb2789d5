"""A model of the messages between workers, to find orders of events in which they block."""
