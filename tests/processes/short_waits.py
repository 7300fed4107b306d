"""Command line with other waits between processes: `short_waits.py SILENCE_S GRACE_S ARGUMENTS...`."""

import sys

from jaxserve import __main__ as command
from jaxserve.distributed import peers

peers.SILENCE_S, peers.GRACE_S = float(sys.argv.pop(1)), float(sys.argv.pop(1))
sys.exit(command.main())
