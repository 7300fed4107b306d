"""One of several processes without an engine: `peer.py COUNT ID PORT`. The first one prints the port that it opens."""

import sys
import time

from jaxserve.distributed import peers

peers.BEAT_S, peers.SILENCE_S, peers.GRACE_S = 0.2, 3.0, 0.5
KEY = b"of this test"


def main() -> None:
    """Wait until the run ends; the first process prints a second line when all have connected."""
    count, index, port = map(int, sys.argv[1:])
    if index:
        for event in peers.Follower(("127.0.0.1", port), KEY, index, "this host").events():
            raise AssertionError(event)
    listener = peers.listen("127.0.0.1")
    print(listener.getsockname()[1], flush=True)
    _leader = peers.Leader(listener, KEY, count - 1)
    print("all have connected", flush=True)
    while True:
        time.sleep(1)


main()
