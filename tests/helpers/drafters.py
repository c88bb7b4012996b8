"""Drafters for tests: right, wrong, or hostile by design."""

import random

import torch

from companion.generate import Draft, Proposal


class Knows(Draft):
    """Knows the answer and spoils it where `spoiled(position)` says so: token + 1 there."""

    def __init__(self, prompt, answer, vocab, spoiled=lambda at: False, least=None):
        self.text, self.vocab, self.spoiled = [*prompt, *answer], vocab, spoiled
        self.start, self.least, self.asked = len(prompt), least, []

    def propose(self, tokens, k):
        assert self.text[: len(tokens)] == list(tokens)
        self.asked.append((len(tokens), k))
        n = k if self.least is None else self.least.randint(0, k)
        at = len(tokens)
        return Proposal([(self.text[i] + self.spoiled(i)) % self.vocab for i in range(at, at + n)])


def right(prompt, answer, vocab):
    return Knows(prompt, answer, vocab)


def wrong(prompt, answer, vocab):
    return Knows(prompt, answer, vocab, lambda at: True)


def mixed(prompt, answer, vocab, seed=0):
    """Wrong at a third of the places, and of any length from nothing to k."""
    r = random.Random(seed)
    bad = {i for i in range(500) if r.random() < 0.33}
    return Knows(prompt, answer, vocab, lambda at: at in bad, least=r)


class Says(Draft):
    """Always the same proposal, cut to k unless `uncut`."""

    def __init__(self, ids, probs=None, uncut=False):
        self.ids, self.probs, self.uncut = ids, probs, uncut

    def propose(self, tokens, k):
        whole = Proposal(self.ids, self.probs)
        return whole if self.uncut else whole.first(k)


class Repeats(Draft):
    """The last token, over and over."""

    def propose(self, tokens, k):
        return Proposal([tokens[-1]] * k)


class TableDraft(Draft):
    """Draws from a table of distributions by the last token, (V, V)."""

    def __init__(self, table):
        self.table = table

    def begin(self, target, room, sampler):
        self.uniform = sampler.uniform

    def propose(self, tokens, k):
        ids, rows, last = [], [], tokens[-1]
        for _ in range(k):
            q = self.table[last]
            u = self.uniform()
            last = min(int((q.cumsum(0) <= u).sum()), int(q.nonzero().max()))
            ids.append(last)
            rows.append(q)
        return Proposal(ids, torch.stack(rows))
