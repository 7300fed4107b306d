"""Load reports in headers (ORCA), by which load balancers choose a server without asking for its metrics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from jaxserve.server.http import header_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxserve.api.metrics import Occupancy

REQUEST_HEADER, REPLY_HEADER = b"endpoint-load-metrics-format", b"endpoint-load-metrics"


def load_header(
    headers: Sequence[tuple[bytes, bytes]], occupancy: Occupancy, estimated_wait_s: float
) -> list[tuple[bytes, bytes]]:
    """Return the header with the load of a server, if a request asks for it as TEXT or JSON; otherwise nothing.

    Args:
        headers: headers of the request.
        occupancy: requests and pages of the engine.
        estimated_wait_s: time until a request that came now would start.
    """
    wanted = header_value(headers, REQUEST_HEADER).strip().upper()
    if wanted not in (b"TEXT", b"JSON"):
        return []
    metrics = {
        "kv_cache_usage_perc": occupancy.num_pages_used / max(occupancy.num_pages, 1),
        "num_requests_waiting": float(occupancy.num_waiting),
        "num_requests_running": float(occupancy.num_running),
        "estimated_wait_seconds": estimated_wait_s,
    }
    if wanted == b"JSON":
        report = json.dumps({"named_metrics": metrics})
    else:
        report = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
    return [(REPLY_HEADER, wanted + b" " + report.encode())]
