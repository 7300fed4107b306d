"""Entry point of the command `jaxserve` and of `python -m jaxserve`."""

import sys

from jaxserve import interrupts


def main() -> int:
    """Run the command line and return the exit code."""
    interrupts.install()  # first, since the other imports are slow
    from jaxserve import cli  # noqa: PLC0415

    code = cli.main()
    if code == interrupts.EXIT_CODE:
        interrupts.leave()
    return code


if __name__ == "__main__":
    sys.exit(main())
