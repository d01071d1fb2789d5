"""Given clusters: a scheduler starts every process, and they meet at the chief's address.

Each process reads from its environment which of them it is (`find`, one file for each form of environment). The chief
opens a *reception*, a small process beside its own. The others become *followers*: each proves that it knows the run's
secret (`handshake`), and is from then on the agent of its worker, over that connection in place of SSH.

    chief's script                                      a process that the scheduler has started
    Coordinator ── Channel ── reception ── TCP ── follower (an agent) ── guard ── the same script: Member
"""
