"""Pods of dead nodes, and when they may be forgotten. A node that is gone cannot say that its pod has ended.

A StatefulSet makes no second pod of a name while the first one exists, and a pod on a node that does not answer exists
until somebody says otherwise. Nobody may say so just because the node is silent: it may only be cut off. The worker's
Lease tells: a fence that lives renews it, and one that cannot has ended its program before the Lease is over. So a pod
is forgotten (deleted by force) only when its node is not ready and its Lease has not changed for the duration and the
margin, as seen on our own clock: as long as a successor would wait. Then the holder's name is taken off the Lease, by a
write that the API server refuses if it was renewed meanwhile, and the next pod's fence need not wait once more.
"""

from dataclasses import dataclass
from typing import Final

from everdeck.cluster.fence import seen_in
from everdeck.cluster.lease import Terms
from everdeck.cluster.objects import Manifest

_TERMS: Final = Terms()


@dataclass(frozen=True, slots=True)
class Rescue:
    """One pod as it stands: where, whether its node answers, and since when its Lease has not changed, or is gone."""

    pod: Manifest
    node_ready: bool
    lease: Manifest | None
    lease_since: float
    terms: Terms = _TERMS

    @property
    def due_at(self) -> float | None:
        """When the pod may be forgotten, on the clock of ``lease_since``; None while its node answers."""
        if self.node_ready or not self.pod["spec"].get("nodeName"):
            return None
        # Nobody's Lease, and none at all, are waited for as well: somebody may have taken it from a fence that lives.
        duration = 0.0 if self.lease is None else seen_in(self.lease).duration
        return self.lease_since + max(duration, self.terms.duration) + self.terms.margin


def is_ready(node: Manifest | None) -> bool:
    """Does the node answer? One that is not known any more does not."""
    for condition in ((node or {}).get("status") or {}).get("conditions") or ():
        if condition["type"] == "Ready":
            return bool(condition["status"] == "True")
    return False
