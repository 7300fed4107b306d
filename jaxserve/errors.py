"""The errors a user meets. Each says what must hold, what came, and what to change."""


class ConfigError(ValueError):
    """The engine cannot start as configured; raised before any request is accepted."""


class RequestError(ValueError):
    """One request is refused; the engine and all other requests go on."""


class PeerLostError(RuntimeError):
    """A process of this run is gone, and its devices with it: start the run again."""


def install_extra(extra: str) -> str:
    """What to do where a package is missing that comes with an extra of this one."""
    return f"install the extra {extra}: pip install 'jaxserve[{extra}]', or in a clone pip install -e '.[{extra}]'"
