"""The command `jaxserve`, also as `python -m jaxserve`."""

import sys

from jaxserve import interrupts


def main() -> int:
    """Run the command line; returns the exit code."""
    interrupts.install()  # before anything slow is imported
    from jaxserve import cli  # noqa: PLC0415

    code = cli.main()
    if code == interrupts.EXIT_CODE:
        interrupts.leave()
    return code


if __name__ == "__main__":
    sys.exit(main())
