"""The compute part once for each replica, and what joins what the replicas make."""
