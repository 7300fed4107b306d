"""The errors a user meets. Each says what must hold, what came, and what to change."""


class ConfigError(ValueError):
    """The engine cannot start as configured; raised before any request is accepted."""


class RequestError(ValueError):
    """One request is refused; the engine and all other requests go on."""


class PeerLostError(RuntimeError):
    """A process of this run is gone, and its devices with it: start the run again."""
