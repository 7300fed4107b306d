"""Pages in a file: work that fails unexpectedly ends all the same."""

import queue
from unittest import mock

from jaxserve.api.metrics import EngineStats
from jaxserve.execution.page_bytes import PageBytes
from jaxserve.execution.page_media import DiskPages
from jaxserve.scheduling.kv_cache.page_archive import PageArchive, SlicedArchive
from jaxserve.scheduling.kv_cache.stored_pages import PageKey


def test_requests_hear_of_reads_and_writes_that_fail() -> None:
    conversion, archive = mock.Mock(spec=PageBytes), mock.Mock(spec=SlicedArchive, num_slices=1)
    conversion.parts.side_effect = archive.read.side_effect = ValueError
    with mock.patch.object(DiskPages, "_slice", return_value=archive):
        pages = DiskPages(lambda: mock.Mock(spec=PageArchive, num_corrupt=0), conversion, None, EngineStats())
    key, ended = PageKey(0, b"page"), queue.SimpleQueue()
    assert pages.put(key, (), ended.put)
    assert ended.get(timeout=10) is False
    pages.get(key, ended.put)
    assert ended.get(timeout=10) is None
    pages.close()
