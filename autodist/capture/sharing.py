"""Resources that the runs of a session share, though each run's graph has nodes of its own for them."""

from __future__ import annotations

from autodist.graph.editor import NodeDef


def share(node: NodeDef, session: str) -> str:
    """Gives the resource that a node makes one name in all runs of a session; returns it.

    Args:
        node: of an iterator or a table, whose name may differ from run to run.
        session: a name that no other session has.
    """
    shared = f"{session}/{node.attr['shared_name'].s.decode() or node.name}"
    node.attr["shared_name"].s = shared.encode()
    return shared
