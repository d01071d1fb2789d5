"""Processes on machines: starting the script on every worker, watching it, and leaving nothing behind.

A run has one *coordinator*, in the chief's process. For every other worker it opens a channel to an *agent*, a small
process on the worker's machine, through a *transport* (local, or SSH). The agent starts the script under a *guard*,
which ends the script and all that it started as soon as the agent is gone. Inside the script, a *member* is the
worker's side of the run.

    chief's script                        worker's machine
    Coordinator ── Channel ── agent ── guard ── the same script: Member
                 (local pipe or SSH)

Where a scheduler has started all processes, `given` has them meet, and each is the agent of its own worker.

This file imports nothing, since the agent and the guard start through it and have to be light: import what you need
from its module (`autodist.cluster.coordinator`, `.member`, `.servers`).
"""
