"""The deck of a Kubernetes namespace: one worker is one StatefulSet of 0 or 1, and the cluster's API is the registry.

:mod:`naming` and :mod:`objects` decide purely which objects a worker is made of. :mod:`fence` is the first process of
a worker's pod: it holds the Lease, and ends everything in the pod before somebody else may take it. :mod:`pod` is what
the fence starts: the deck of this one worker, on the worker's volume. :mod:`deck` keeps the contract of
:class:`everdeck.verbs.Verbs` over all of them, and :mod:`operator` brings workers back whose node has died.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everdeck.cluster.deck import ClusterDeck

__all__ = ["ClusterDeck"]


def __getattr__(name: str) -> Any:
    if name == "ClusterDeck":  # loaded when asked for: the fence in a pod needs none of it
        from everdeck.cluster.deck import ClusterDeck  # noqa: PLC0415 - the point of this function

        return ClusterDeck
    raise AttributeError(f"module 'everdeck.cluster' has no attribute {name!r}")
