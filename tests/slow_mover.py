"""A page mover over a simulated device and dictionaries: it takes its time, fails, and ends moves in any order."""

from jaxserve.api.cached_tokens import LOWER_TIERS
from jaxserve.scheduling.kv_cache.pages import STATES
from jaxserve.scheduling.kv_cache.stored_pages import StoredPages
from jaxserve.scheduling.kv_cache.transfers import DEVICE, Deletion, EndedMoves

LOST = "content of a page that is being loaded"


class SlowMover:
    """Tiers of `num_pages` pages each, in the order of their numbers.

    A page of the device holds what is `LOST` while it is loaded, and must not change while it is stored: whoever else
    writes to the page meanwhile, or reads it, is found out by the contents that the device checks.

    Attributes:
        device: device whose pages it moves; None to replay what was requested.
        moves: moves that have not ended.
        counts: number of moves that were requested, and of those that ended well, loads, stores and copies; and of
            states that were kept.
    """

    def __init__(self, page_size, num_pages, device=None):
        self.page_size, self.num_pages, self.device = page_size, num_pages, device
        self.moves = []
        self.contents = [
            None,
            *({} for _ in num_pages),
        ]  # a mapping for each tier: key -> content, and the move that stored it
        self._before = {}  # key of a move -> content of the page
        self._ended = []
        self.counts = dict.fromkeys(["loads", "stores", "copies", "loaded", "stored", "copied", "kept"], 0)

    def new_tiers(self):
        names = LOWER_TIERS[:2][-len(self.num_pages) :]
        return [StoredPages(*each, state_pages=2) for each in zip(names, self.num_pages, strict=True)]

    def keep_states(self, kept):
        self.counts["kept"] += len(kept)
        if self.device is not None:
            self.device.states.update((-1 - page, self.device.states[slot]) for slot, page in kept)

    def start_moves(self, requested):
        self.moves += requested.forgotten
        self._before.update((move.key, None) for move in requested.forgotten)
        if requested.is_cleared:
            for contents in self.contents[1:]:
                contents.clear()
        for each in requested.work:
            if isinstance(each, Deletion):
                self.contents[each.tier].pop(each.content, None)
            else:
                self._start(each)
        for contents, num_pages in zip(self.contents[1:], self.num_pages, strict=True):
            assert len(contents) <= num_pages, "a tier is too full"

    def _start(self, move):
        name = "loads" if move.is_load else "stores" if move.source == DEVICE else "copies"
        self.counts[name] += 1
        assert DEVICE not in (move.source, move.target) or move.place not in {m.place for m in self.moves}
        if move.source == DEVICE:
            before = self._read(move)
        else:
            before, _ = self.contents[move.source].get(move.content, (None, None))
        if move.is_load:
            self._write(move, [LOST] * len(self._entries(move)))
        elif before is not None:
            self.contents[move.target][move.content] = before, move.key
        self._before[move.key] = before
        self.moves.append(move)

    def page_s(self):
        return [0.0] * len(self.num_pages)

    def end(self, index, *, ok):
        """End a move, well if it can; return its key and whether it could."""
        move = self.moves.pop(index)
        before = self._before.pop(move.key)
        ok = ok and before is not None
        if move.is_load and ok:
            assert {*self._read(move)} == {LOST}, "written while it loads"
            self._write(move, before)
        elif not move.is_load and not ok and before is not None:
            if self.contents[move.target].get(move.content) == (before, move.key):
                del self.contents[move.target][move.content]
        elif move.source == DEVICE and ok:
            assert before == self._read(move), "written while it is stored"
        if ok:
            name = "loaded" if move.is_load else "stored" if move.source == DEVICE else "copied"
            self.counts[name] += 1
        self._ended.append(EndedMoves([move.key], ok))
        return move.key, ok

    def end_all(self, *, ok=True):
        for _ in range(len(self.moves)):
            self.end(0, ok=ok)

    def take_ended(self):
        ended, self._ended = self._ended, []
        return ended

    def sync(self):
        """Nothing is written."""
        return True

    def forget(self):
        self.moves.clear()
        self._before.clear()
        self._ended.clear()
        for contents in self.contents[1:]:
            contents.clear()

    def close(self):
        pass

    def _pool(self, move):
        return self.device.states if move.content.group == STATES else self.device.kv

    def _entries(self, move):
        if move.content.group == STATES:
            return [-1 - move.page]
        return [(move.page, offset) for offset in range(self.page_size)]

    def _read(self, move):
        return [self._pool(move).get(entry) for entry in self._entries(move)]

    def _write(self, move, contents):
        self._pool(move).update(zip(self._entries(move), contents, strict=True))
