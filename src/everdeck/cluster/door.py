"""Joins standard input and output to the socket of the pod's deck, byte for byte.

``python -m everdeck.cluster.door`` is what the deck of the namespace runs in a pod (the API's exec): the verbs travel
as the same frames as on one box. It ends when either side does.
"""

import os
import select
import socket
import sys

from everdeck.cluster.volume import STATE
from everdeck.statedir import StateDir


def main() -> int:
    """Carry bytes both ways until one side is done."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(StateDir(STATE).socket))
    ways = {sys.stdin.fileno(): connection.fileno(), connection.fileno(): sys.stdout.fileno()}
    while True:
        ready, _, _ = select.select(list(ways), [], [])
        for source in ready:
            block = os.read(source, 1 << 16)
            if not block:
                return 0
            view = memoryview(block)
            while view:
                view = view[os.write(ways[source], view) :]


if __name__ == "__main__":
    sys.exit(main())
