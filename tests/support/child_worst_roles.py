"""Which processes each kind of :mod:`support.child_worst` consists of."""

ROLES = {
    "deaf": ["leader"],
    "closes-stdin": ["leader"],
    "double-forks": ["leader", "daemon"],
    "setsid": ["leader", "child"],
    "closes-everything": ["leader"],
    "clears-environment": ["leader", "child"],
    "stopped": ["leader"],
    "forks-in-a-loop": ["leader"],
}
