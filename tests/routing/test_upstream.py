"""Upstream: replies of all forms, however their bytes come, and connections that are used again or not."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import pairwise

import pytest

from jaxserve.routing.upstream import BrokenReplyError, ConnectError, Upstream

BODY = bytes(random.Random(1).randbytes(5000))
SIZES = (1, 17, 4000, 982)


def chunked(body: bytes) -> bytes:
    parts, start = [], 0
    for size in SIZES:
        parts.append(b"%x;a=b\r\n%b\r\n" % (size, body[start : start + size]))
        start += size
    assert start == len(body)
    return b"".join(parts) + b"0\r\ntrailer: 1\r\n\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nx-a: 1\r\nX-A: \xc3\xa4\r\n"
LENGTH = HEAD + b"content-length: 5000\r\n\r\n" + BODY
CHUNKED = b"HTTP/1.1 100 Continue\r\nx-a: 0\r\n\r\n" + HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(BODY)
UNTIL_END = HEAD + b"\r\n" + BODY


async def replies(script: Sequence[tuple[str, Sequence[bytes]]]) -> tuple[list[object], int]:
    """Ask a server once for each method in a script, which it answers in parts; it closes after an empty part.

    Returns:
        Status, values of "x-a" and body of each reply, or the error; and the number of connections.
    """
    left, num_connections = [*script], 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        with closing(writer), suppress(ConnectionError):
            while left and (await reader.readline()):
                await reader.readuntil(b"\r\n\r\n")
                for part in left.pop(0)[1]:
                    if not part:
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstream, found = Upstream(f"http://127.0.0.1:{port}", 1.0, 10.0), list[object]()
    for method, _ in script:
        try:
            async with upstream.request(method, "/a", [("b", "c")]) as reply:
                found.append((reply.status, reply.headers.getall("x-a", []), await reply.read()))
        except BrokenReplyError:
            found.append(BrokenReplyError)
    upstream.close()
    server.close()
    return found, num_connections


def in_parts(data: bytes, seed: int) -> list[bytes]:
    """Return random parts of some bytes."""
    rng = random.Random(seed)
    cuts = sorted(
        {0, len(data), *(rng.randrange(1, min(len(data), 200)) for _ in range(9)), rng.randrange(1, len(data))}
    )
    return [data[start:stop] for start, stop in pairwise(cuts)]


@pytest.mark.parametrize("seed", range(4))
def test_replies_are_those_sent(seed: int) -> None:
    script = [("GET", in_parts(data, seed)) for data in (LENGTH, CHUNKED, LENGTH)]
    script += [
        ("HEAD", [LENGTH[: -len(BODY)]]),
        ("GET", [b"HTTP/1.1 204 No Content\r\n\r\n"]),
        ("GET", [UNTIL_END, b""]),
    ]
    found, num_connections = asyncio.run(replies(script))
    whole = (200, ["1", "\u00e4"], BODY)
    assert found == [whole, whole, whole, (200, ["1", "\u00e4"], b""), (204, [], b""), whole]
    assert num_connections == 2, "only the reply to HEAD, whose body may or may not follow, takes its connection"


@pytest.mark.parametrize("data", [LENGTH[:-1], CHUNKED[:-1], CHUNKED[:-600], HEAD, b"SSH-2.0-a\r\n", b"HTTP/1.1 x\r\n"])
def test_replies_that_break_off_are_errors(data: bytes) -> None:
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na"
    found, num_connections = asyncio.run(replies([("GET", [data, b""]), ("GET", [ok])]))
    assert found == [BrokenReplyError, (200, [], b"a")]
    assert num_connections == 2


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (b"HTTP/1.1 200 ", b"\r\ncontent-length: 0\r\n\r\n"),
        (HEAD + b"a: ", b"\r\ncontent-length: 0\r\n\r\n"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"\r\na\r\n0\r\n\r\n"),
        (CHUNKED[:-2] + b"a: ", b"\r\n\r\n"),
    ],
    ids=["status", "header", "chunk", "trailer"],
)
def test_lines_that_are_too_long_are_errors(start: bytes, end: bytes) -> None:
    for size, expected in ((2**15, 200), (2**20, None)):
        found, _ = asyncio.run(replies([("GET", [start, *[bytes([97]) * 2**15] * (size // 2**15), end])]))
        assert [each[0] if isinstance(each, tuple) else None for each in found] == [expected]


@pytest.mark.parametrize(
    ("method", "data", "expected"),
    [
        ("GET", LENGTH + LENGTH.replace(b"200", b"500"), (200, ["1", "\u00e4"], BODY)),
        ("GET", LENGTH + b"?", (200, ["1", "\u00e4"], BODY)),
        ("HEAD", LENGTH, (200, ["1", "\u00e4"], b"")),
        ("GET", b"HTTP/1.1 304 N\r\ncontent-length: 2\r\n\r\nok", (304, [], b"")),
        ("GET", b"HTTP/1.1 101 S\r\nconnection: upgrade\r\nupgrade: a\r\n\r\nok", BrokenReplyError),
    ],
)
def test_more_than_a_reply_is_no_part_of_it_nor_of_the_next_one(method: str, data: bytes, expected: object) -> None:
    found, num_connections = asyncio.run(replies([(method, [data]), ("GET", [LENGTH])]))
    assert found == [expected, (200, ["1", "\u00e4"], BODY)]
    assert num_connections == 2


def test_a_reply_that_nobody_reads_does_not_stop_the_next_one() -> None:
    body = bytes(2**18 + 2**17)  # more than may wait, of which the rest comes at once

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async def ask() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 1.0, 10.0)
        async with upstream.request("GET", "/") as reply:
            while not reply._connection.is_complete:
                await asyncio.sleep(0.001)
        async with asyncio.timeout(5.0), upstream.request("GET", "/") as reply:
            assert await reply.read() == body
        upstream.close()
        server.close()

    asyncio.run(ask())


def test_a_server_that_is_not_there_is_an_error() -> None:
    async def ask() -> None:
        async with Upstream("http://127.0.0.1:1", 1.0, 1.0).request("GET", "/"):
            pass

    with pytest.raises(ConnectError, match="Connect call failed"):
        asyncio.run(ask())
