"""KVTransfer: vLLM's `kv_transfer_params`, by which one server computes a prompt for another.

A router sends a prompt to a producer with `do_remote_decode`, and passes the reply's `kv_transfer_params`, with
`do_remote_prefill`, on to a consumer. The pages are in the store that both share, and the consumer computes only the
last token. Pages that are missing are computed, so nothing has to be held for a consumer, or freed.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxserve import __version__
from jaxserve.openai.errors import BadRequestError, Json
from jaxserve.openai.fields import ANY, SWITCH, TEXT, BodyReader, ObjectFields, each

FIELD = "kv_transfer_params"
_FIELDS: ObjectFields = {
    **each(SWITCH, "do_remote_prefill", "do_remote_decode"),
    **each(ANY, "remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port"),
    **each(ANY, "tp_size", "remote_num_tokens"),
    **each(TEXT, "remote_version", "remote_pages"),  # jaxserve's own
}


class KVTransfer(NamedTuple):
    """A server's part in a transfer.

    Attributes:
        sends: True to compute the prompt for another server.
        version: version of the server that has computed it; empty if unknown.
        pages: identity of its pages, by weights and layout; empty if unknown.
    """

    sends: bool
    version: str = ""
    pages: str = ""

    def check(self, own_pages: str) -> None:
        """Raise BadRequestError if the pages cannot be read here.

        Args:
            own_pages: identity of this server's pages; empty without a store.
        """
        if not own_pages:
            message = f"{FIELD} needs a store of pages that servers share; start this server with --kv-store"
            raise BadRequestError(message, FIELD, "unsupported_value")
        if self.version and self.version != __version__:
            message = f"the prompt was computed by version {self.version}, and this server has {__version__}"
        elif self.pages and self.pages != own_pages:
            message = (
                f"the prompt was computed with other weights or another layout of pages, {self.pages}, and this "
                f"server has {own_pages}"
            )
        else:
            return
        raise BadRequestError(f"{message}; leave {FIELD} out to compute it here", FIELD, "kv_mismatch", 409)

    def reply(self, pages: str, request_id: str, num_tokens: int, page_size: int) -> Json:
        """Return the parameters for the server that continues.

        Args:
            pages: identity of this server's pages.
            request_id: id of the request.
            num_tokens: prompt tokens whose pages are in the store.
            page_size: tokens per page.
        """
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": pages,
            "remote_request_id": request_id,
            "remote_block_ids": [*range(-(-num_tokens // page_size))],
            "remote_host": None,
            "remote_port": None,
            "remote_num_tokens": num_tokens,
            "remote_version": __version__,
            "remote_pages": pages,
        }


def read_transfer(given: Json, reader: BodyReader) -> KVTransfer | None:
    """Return the transfer in a body's checked fields; None if there is none.

    Raises:
        BadRequestError: a field has a wrong type, or both directions are requested.
    """
    fields = reader.read(given.get(FIELD) or {}, _FIELDS, FIELD, FIELD)
    sends, takes = fields.get("do_remote_decode", False), fields.get("do_remote_prefill", False)
    if sends and takes:
        message = f"{FIELD} must have only one of do_remote_decode and do_remote_prefill true"
        raise BadRequestError(message, FIELD)
    if sends and given.get("stream"):
        message = f"stream must be false with do_remote_decode in {FIELD}, as only whole replies have {FIELD}, got true"
        raise BadRequestError(message, "stream")
    if not (sends or takes):
        return None
    return KVTransfer(sends, fields.get("remote_version", ""), fields.get("remote_pages", ""))
