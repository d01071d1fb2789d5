"""Given clusters: a scheduler starts every process, and the processes find each other at the chief's address.

Each process reads its index from its environment (`launchers`). The chief starts a *rendezvous server* in a relay
process on its machine. The others become *followers*: each proves that it knows the run's secret (`handshake`), and is
then the agent of its worker, over that connection instead of SSH.

    chief's script                                      a process that the scheduler has started
    Coordinator ── Channel ── rendezvous server ── TCP ── follower (an agent) ── guard ── the same script: WorkerClient
"""
