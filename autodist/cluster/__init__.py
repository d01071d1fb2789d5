"""Process management: starts the script on every worker, monitors it, and leaves no process behind.

A run has one *coordinator*, in the chief's process. For every other worker it opens a channel to an *agent*, a small
process on the worker's machine, through a *transport* (local, or SSH). The agent starts the script under a *guard*,
which ends the script and all its child processes as soon as the agent is gone. Inside the script, a *worker client*
represents the worker; a *worker connection* represents it in the coordinator.

    chief's script                        worker's machine
    Coordinator ── Channel ── agent ── guard ── the same script: ScriptClient
                 (local pipe or SSH)

If a scheduler has started all processes, they find each other through the rendezvous server of
`autodist.cluster.environments`. Each process is then the agent of its own worker.

If another program calls a function in its processes (`hosted_function`), nothing is started: the agent and the worker
client are threads of such a process.

This file imports nothing: the agent and the guard are loaded through it and must start fast. Import each name from its
module (`autodist.cluster.coordinator`, `.script_client`, `.servers`).
"""
