"""WeightsContent: the identity of weights, to which pages on disk are bound."""

import logging
import os
import secrets

from jaxserve import weights
from jaxserve.assembly.parameters import Weights
from jaxserve.models import registry

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32


class WeightsContent:
    """Content of a checkpoint that is about to be loaded.

    Args:
        given: directory or file of the checkpoint; or arrays, which no other engine recognises.
    """

    def __init__(self, given: Weights) -> None:
        self._path = given if isinstance(given, str | os.PathLike) else None
        self._digest = secrets.token_bytes(_DIGEST_BYTES)
        if self._path is not None:
            with registry.config_errors():
                self._stamps = weights.file_stamps(self._path)
                self._digest = weights.content_digest(self._path)

    def loaded(self) -> bytes:
        """Return the digest of the loaded weights; a random one if files changed meanwhile."""
        if self._path is not None and weights.file_stamps(self._path) != self._stamps:
            logger.warning("%s changed while it was loaded; no other engine reads the KV pages of this one", self._path)
            self._path, self._digest = None, secrets.token_bytes(_DIGEST_BYTES)
        return self._digest
