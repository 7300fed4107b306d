"""A tier of pages over a simulated device: a dictionary that takes its time, fails, and ends moves in any order."""

from collections import OrderedDict

LOST = "content of a page that is being loaded"


class SlowTier:
    """Pages that were stored, by group and hash; the one stored first goes when there are more than `num_pages`.

    A page of the device holds what is `LOST` while it is loaded, and is read when its store ends: whoever else writes
    to the page meanwhile, or reads it, is found out by the contents that the device checks.

    Attributes:
        device: device whose pages it moves; None to replay what it was asked for.
        moves: moves that have not ended.
        counts: number of moves that were asked for, and of those that ended well, loads and stores.
    """

    name = "disk"

    def __init__(self, page_size, num_pages, device=None):
        self.page_size, self.num_pages, self.device = page_size, num_pages, device
        self.moves, self.num_new = [], 0
        self.stored = OrderedDict()  # key of the move that stored each page
        self.sources = {}  # key of a load -> key of the move that stored its content
        self.contents = {}
        self.counts = {"loads": 0, "stores": 0, "loaded": 0, "stored": 0}

    # The side of the scheduler

    def has(self, group, page_hash):
        return (group, page_hash) in self.stored

    def load(self, move):
        assert move.is_load
        self.sources[move.key] = self.stored[move.group, move.page_hash]
        self._begin(move, "loads")

    def store(self, move):
        assert not move.is_load
        self._begin(move, "stores")

    def _begin(self, move, name):
        self.counts[name] += 1
        if self.device is not None:
            assert move.page not in {other.page for other in self.moves}, "a page moves twice"
            self.moves.append(move)
            self.num_new += 1

    def transferred(self, move, *, ok):
        key = move.group, move.page_hash
        if move.is_load:
            source = self.sources.pop(move.key)
            if not ok and self.stored.get(key) == source:  # not what was stored anew meanwhile
                del self.stored[key]
        elif ok:
            self.stored[key] = move.key
            if len(self.stored) > self.num_pages:
                self.stored.popitem(last=False)

    def clear(self):
        self.stored.clear()

    def restart(self):
        self.clear()
        self.moves.clear()
        self.sources.clear()
        self.num_new = 0

    # The side of the bytes

    def launch(self):
        """Begin the moves that were asked for, after the plan that was made meanwhile."""
        for move in self.moves[len(self.moves) - self.num_new :]:
            if move.is_load:
                self.device.kv.update(dict.fromkeys(self._entries(move), LOST))
        self.num_new = 0

    def end(self, index, *, ok):
        """End a move, well if it can; return its key and whether it could."""
        move = self.moves.pop(index)
        key = move.group, move.page_hash
        if ok and move.is_load:
            assert {self.device.kv[entry] for entry in self._entries(move)} == {LOST}, "written while it loads"
            ok = key in self.contents
            self.device.kv.update(zip(self._entries(move), self.contents.get(key, ()), strict=False))
        elif ok:
            self.contents[key] = [self.device.kv.get(entry) for entry in self._entries(move)]
        if ok:
            self.counts["loaded" if move.is_load else "stored"] += 1
        return move.key, ok

    def _entries(self, move):
        return [(move.page, offset) for offset in range(self.page_size)]
