"""The manager under any sequence of calls, against lists and dictionaries, with a storage that follows it.

The storage is a dictionary from slots to what would be computed there: a token and everything before it.
A new block holds rubbish until it is written. After every call each sequence must read its own past in its
slots, whoever shared, copied, cropped or evicted what in between.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paging_plain import manager_state

import companion.paging.prefix
from companion.paging import BlockManager, PoolFull

BIT = st.integers(0, 1)
PROMPTS = st.builds(
    lambda k, n, tail: [k] * n + tail, BIT, st.sampled_from([4, 9, 6, 2, 1, 0]), st.lists(BIT, max_size=4)
)
PERMUTED = st.sampled_from([lambda t: t, lambda t: t[::-1], lambda t: t[1:] + t[:1]])
SALTS = st.sampled_from([(), (), ("a",)])


class Weak:
    """A digest with three values."""

    def __init__(self, data):
        self.data = data

    def digest(self):
        return bytes([sum(self.data) % 3]) * 32


class ManagerMachine(RuleBasedStateMachine):
    exact = True  # whether hits can be predicted

    @initialize(num_blocks=st.sampled_from([6, 12, 9, 3, 1]), block_size=st.sampled_from([2, 1, 3, 4]))
    def start(self, num_blocks, block_size):
        self.manager = BlockManager(num_blocks, block_size)
        self.n, self.size = num_blocks, block_size
        self.seqs = []  # [sequence, tokens, salt]
        self.history = [[], [0] * 5]  # prompts that came
        self.slots = {}  # slot -> (salt, the tokens up to this one)
        # The naive cache: what each registered block holds, by name; names are told apart as prefixes are.
        self.names, self.holds, self.order, self.made = {}, {}, [], 0

    # --- the model -------------------------------------------------------------------------------------

    def refs(self):
        count = {}
        for seq, *_ in self.seqs:
            for i in seq.table.ids:
                count[i] = count.get(i, 0) + 1
        return count

    def predicted_hit(self, tokens, salt):
        found, parent = [], 0
        for k in range((len(tokens) - 1) // self.size if tokens else 0):
            name = self.names.get((parent, tuple(tokens[k * self.size : (k + 1) * self.size]), salt))
            blocks = [b for b, held in self.holds.items() if held == name]
            if name is None or not blocks:
                break
            found.append(blocks[-1])  # dictionaries keep the order of registration
            parent = name
        return found

    def forget(self, block):
        name = self.holds.pop(block)
        if name not in self.holds.values():
            self.names = {key: other for key, other in self.names.items() if other != name}

    def took(self, new, before):
        """`new` blocks were allocated: the right cached ones were evicted for it, and rubbish is in all."""
        plain_free = self.n - len(before) - len(self.order)
        evicted = self.order[: max(0, len(new) - plain_free)]
        assert [i for i in new if i in self.order] == evicted
        for i in evicted:
            self.order.remove(i)
            self.forget(i)
        assert not set(new) & (before.keys() | set(self.order)) and len(set(new)) == len(new)
        for i in new:
            for offset in range(self.size):
                self.slots[i * self.size + offset] = "rubbish"

    def dropped(self, ids, before):
        """References to ids went, in this order."""
        after = self.refs()
        self.order += [i for i in ids if i in before and i not in after and i in self.holds]

    def write(self, seq, tokens, salt, start):
        for p in range(start, len(tokens)):
            self.slots[seq.table.slot(p)] = (salt, tuple(tokens[: p + 1]))

    def refused(self, error, call, *arguments):
        before = manager_state(self.manager)
        with pytest.raises(ValueError) as raised:
            call(*arguments)
        assert isinstance(raised.value, PoolFull) == (error == "not now")
        assert manager_state(self.manager) == before

    def pick(self, data):
        return data.draw(st.sampled_from(self.seqs))

    # --- the calls -------------------------------------------------------------------------------------

    @rule(tokens=PROMPTS, salt=SALTS, written=st.booleans())
    def allocate(self, tokens, salt, written):
        before = self.refs()
        total = -(-len(tokens) // self.size)
        if self.exact:
            found = self.predicted_hit(tokens, salt)
        else:
            found = self.manager.index.match(tokens, salt)
        assert self.manager.lookup(tokens, salt) == len(found) * self.size
        free = self.n - len(before) - len([i for i in found if i not in before])
        if total > self.n:
            return self.refused("never", self.manager.allocate, tokens, salt)
        if total - len(found) > free:
            return self.refused("not now", self.manager.allocate, tokens, salt)
        seq = self.manager.allocate(tokens, salt)
        ids = seq.table.ids
        assert seq.shared == len(found) * self.size and ids[: len(found)] == found
        self.order = [i for i in self.order if i not in found]
        self.took(ids[len(found) :], before | dict.fromkeys(found))
        self.seqs.append([seq, list(tokens), salt])
        self.history.append(list(tokens))
        self.write(seq, tokens, salt, seq.shared)
        if written:
            self.registered(seq, tokens, salt, None)

    @rule(data=st.data(), tail=st.lists(BIT, max_size=4), salt=SALTS, change=PERMUTED)
    def allocate_like_before(self, data, tail, salt, change):
        """What came before and more, or the same tokens in another order."""
        self.allocate(change(data.draw(st.sampled_from(self.history)))[:14] + tail, salt, True)

    @rule(data=st.data())
    def replace(self, data):
        """The oldest leaves and a prompt that came before comes back: what a busy cache does all the time."""
        if self.seqs:
            self.leave(self.seqs[0])
        self.allocate(data.draw(st.sampled_from(self.history)), (), True)

    @precondition(lambda self: getattr(self, "seqs", None))
    @rule(data=st.data(), extra=st.lists(BIT, max_size=6))
    def append(self, data, extra):
        chosen = self.pick(data)
        seq, tokens, salt = chosen
        before, old, n = self.refs(), seq.table.ids[:], len(tokens) + len(extra)
        partial = bool(extra) and len(tokens) % self.size > 0
        copy = partial and before[old[-1]] > 1
        total = -(-n // self.size)
        call = (self.manager.append, seq, extra[0] if len(extra) == 1 else extra)
        if total > self.n:
            return self.refused("never", *call)
        if total - len(old) + copy > self.n - len(before):
            return self.refused("not now", *call)
        copies = self.manager.append(*call[1:])
        ids = seq.table.ids
        new = ids[len(old) - copy :]
        assert len(ids) == total and copies == ([(old[-1], new[0])] if copy else [])
        self.took(new, before)
        for source, destination in copies:
            for offset in range(self.size):
                self.slots[destination * self.size + offset] = self.slots[source * self.size + offset]
        if partial and not copy and old[-1] in self.holds:
            self.forget(old[-1])
        chosen[1] = tokens + extra
        self.write(seq, chosen[1], salt, len(tokens))

    @precondition(lambda self: getattr(self, "seqs", None))
    @rule(data=st.data(), whole=st.booleans())
    def register(self, data, whole):
        seq, tokens, salt = self.pick(data)
        self.registered(seq, tokens, salt, None if whole else data.draw(st.integers(0, len(tokens))))

    def registered(self, seq, tokens, salt, computed):
        new = self.manager.register(seq, computed)
        n = len(tokens) if computed is None else computed
        parent, expected = 0, []
        for k in range(n // self.size):
            block = seq.table.ids[k]
            key = (parent, tuple(tokens[k * self.size : (k + 1) * self.size]), salt)
            if block in self.holds:
                parent = self.holds[block]
                continue
            if key not in self.names:
                self.made += 1
                self.names[key] = self.made
            expected.append(block)
            parent = self.holds[block] = self.names[key]
        assert new == expected

    @precondition(lambda self: getattr(self, "seqs", None) and len(self.seqs) < 8)
    @rule(data=st.data())
    def fork(self, data):
        seq, tokens, salt = self.pick(data)
        self.seqs.append([self.manager.fork(seq), list(tokens), salt])

    @precondition(lambda self: getattr(self, "seqs", None))
    @rule(data=st.data(), n=st.integers(0, 14))
    def crop(self, data, n):
        chosen = self.pick(data)
        before, old = self.refs(), chosen[0].table.ids[:]
        self.manager.crop(chosen[0], n)
        chosen[1] = chosen[1][:n]
        assert chosen[0].table.ids == old[: -(-len(chosen[1]) // self.size)]
        self.dropped(old[::-1], before)

    @precondition(lambda self: getattr(self, "seqs", None))
    @rule(data=st.data())
    def free(self, data):
        self.leave(self.pick(data))

    def leave(self, chosen):
        before, old = self.refs(), chosen[0].table.ids[:]
        self.seqs.remove(chosen)
        self.manager.free(chosen[0])
        self.dropped(old[::-1], before)
        self.refused("never", self.manager.free, chosen[0])

    @rule(n=st.none() | st.integers(0, 3))
    def evict(self, n):
        expected = self.order[:n]
        assert self.manager.evict(n) == expected
        del self.order[:n]
        for i in expected:
            self.forget(i)

    # --- what must hold --------------------------------------------------------------------------------

    @invariant()
    def agrees(self):
        if not hasattr(self, "manager"):
            return
        manager, refs = self.manager, self.refs()
        manager.check()
        assert manager.sequences == [seq for seq, *_ in self.seqs]
        assert [manager.pool.ref_count(i) for i in range(self.n)] == [refs.get(i, 0) for i in range(self.n)]
        assert manager.num_free == self.n - len(refs)
        assert manager.pool.eviction_order() == self.order
        assert set(manager.index) == set(self.holds)
        for seq, tokens, salt in self.seqs:
            assert seq.tokens.tolist() == tokens
            for p in range(len(tokens)):
                assert self.slots[seq.table.slot(p)] == (salt, tuple(tokens[: p + 1]))

    def teardown(self):
        """Every block comes back."""
        if hasattr(self, "manager"):
            for seq, *_ in self.seqs:
                self.manager.free(seq)
            self.manager.evict()
            assert sorted(self.manager.pool.allocate(self.n)) == list(range(self.n))


class WeakDigestMachine(ManagerMachine):
    """The same with a digest that collides all the time: hits may be missed, and none may be wrong."""

    exact = False

    @initialize()
    def weaken(self):
        companion.paging.prefix.sha256, self.strong = Weak, companion.paging.prefix.sha256

    def teardown(self):
        try:
            super().teardown()
        finally:
            if hasattr(self, "strong"):
                companion.paging.prefix.sha256 = self.strong


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=70, stateful_step_count=50, deadline=None)
TestWeakDigestMachine = WeakDigestMachine.TestCase
TestWeakDigestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
