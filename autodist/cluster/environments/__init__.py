"""Environments in which a scheduler starts every process; the processes meet at the chief's address.

Each process reads its index from its environment variables (`launchers`). The chief starts a *rendezvous server* in a
relay process on its machine. Every other process becomes a *follower*: it connects to the server, proves that it has
the run's secret (`handshake`), and is then the agent of its worker, over that connection instead of SSH.

A *hosted agent* does the same in the process of a function (`autodist.join`), and starts nothing.

    chief's script                                      a process that the scheduler has started
    Coordinator ── Channel ── rendezvous server ── TCP ── follower (an agent) ── guard ── the same script: ScriptClient
"""
