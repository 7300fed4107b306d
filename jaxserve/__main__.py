"""Entry point of the command `jaxserve` and of `python -m jaxserve`."""

import sys

from jaxserve.system import signals


def main() -> int:
    """Run the command line and return the exit code."""
    signals.install()  # first, since the other imports are slow
    from jaxserve import cli  # noqa: PLC0415

    code = cli.main()
    if code == signals.EXIT_CODE:
        signals.leave()
    return code


if __name__ == "__main__":
    sys.exit(main())
