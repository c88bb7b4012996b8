"""Pages: blocks in disorder, recycled memory, padding of tables, shared prefixes, and a pool that is full."""

import dataclasses
import math

import jaxtyping
import pytest
import torch
import transformers

from companion.attend.step import gather
from companion.caches import PagedCache, PagedStorage, make_cache
from companion.cost import ModelSpec
from companion.generate import generate
from companion.model import from_transformers
from companion.paging import BlockManager, BlockTable, PoolFull

SIZE = 4
SPEC = ModelSpec(
    name="tiny", architecture="llama", layers=2, d_model=16, heads=6, kv_heads=2, head_dim=32, ffn=8, vocab=32
)
WINDOWED = dataclasses.replace(SPEC, window=5, layer_types=("sliding", "full"))


def draw(n, batch=1, seed=0, nan_from=None):
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(batch, h, n, 32, generator=g, dtype=torch.float64) for h in (6, 2, 2)]
    for x in made:
        for b, stop in enumerate(nan_from or ()):
            x[b, :, stop:] = math.nan
    return made


def storage_of(num_blocks, *, poison=False, spec=SPEC, disorder=False):
    storage = PagedStorage(spec, num_blocks=num_blocks, block_size=SIZE, dtype=torch.float64)
    if poison:
        for t in (*storage.k, *storage.v):
            t.fill_(math.nan)
    if disorder:  # the free blocks lie in no order
        pool = storage.manager.pool
        ids = pool.allocate(num_blocks)
        pool.free(ids[::2] + ids[1::2][::-1])
    return storage


def paged(storage, batch=1, max_tokens=40, **more):
    shape = {"batch": batch, "max_tokens": max_tokens, "dtype": torch.float64}
    return make_cache("paged", storage.spec, storage=storage, **shape, **more)


def plain(batch=1, max_tokens=40, spec=SPEC):
    return make_cache("contiguous", spec, batch=batch, max_tokens=max_tokens, dtype=torch.float64)


def step(caches, q, k, v, lengths=None):
    """One step in every layer of every cache; all must answer alike."""
    for layer in range(2):
        outs = []
        for cache in caches:
            cache.append(layer, k, v, lengths=lengths)
            outs.append(cache.attend(layer, q))
        for b in range(q.shape[0]):
            n = q.shape[2] if lengths is None else lengths[b]
            for out in outs[1:]:
                torch.testing.assert_close(out[b, :, :n], outs[0][b, :, :n], rtol=0, atol=1e-9)
                assert torch.isfinite(out[b, :, :n]).all()


def state(cache):
    s = cache.storage
    tables = [(list(cache._tables.ids(b)), cache._tables.table(b).length) for b in range(cache.batch)]
    pool = s.manager.pool
    refs = [pool.ref_count(i) for i in range(s.num_blocks)]
    return [t.clone() for t in (*s.k, *s.v)], tables, refs, pool.num_free, cache._rows, cache.nbytes_used


def assert_same(a, b):
    assert a[1:] == b[1:]
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a[0], b[0]))  # NaN too


# --- memory that nobody wrote -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE])
@pytest.mark.parametrize("disorder", [False, True], ids=["view", "gather"])
@pytest.mark.parametrize("spec", [SPEC, WINDOWED], ids=["full", "window"])
def test_one_row_in_a_pool_of_nan(n, disorder, spec):
    storage = storage_of(12, poison=True, disorder=disorder, spec=spec)
    cache, twin = paged(storage), plain(spec=spec)
    step([twin, cache], *draw(n))
    assert (cache._tables.run() is None) == (n == 0 or (disorder and n > SIZE))
    for seed in range(1, 7):
        step([twin, cache], *draw(1, seed=seed))
    assert cache.read(1)[0].equal(twin.read(1)[0])
    storage.manager.pool.check()


@pytest.mark.parametrize("poison", [False, True])
def test_ragged_rows_in_a_pool_of_nan(poison):
    storage = storage_of(30, poison=poison, disorder=True)
    cache, twin = paged(storage, batch=4), plain(batch=4)
    for seed, lengths in enumerate(([5, 0, SIZE, 1], [0, 0, 1, 3], [1, 1, 0, 7], [1, 1, 1, 1])):
        step([twin, cache], *draw(7, batch=4, seed=seed, nan_from=lengths), lengths)
    # A NaN that was stored and cropped again is recycled memory too.
    _, k, v = draw(6, batch=4, seed=9)
    for layer in range(2):
        cache.append(layer, k * math.nan, v * math.nan)
    cache.crop(twin.row_lengths())
    step([twin, cache], *draw(2, batch=4, seed=10))


@pytest.mark.parametrize("fill", [-1, 2_147_480_000, -2_147_483_648, 7])
def test_padding_of_the_table_is_never_read_for_a_token(fill):
    storage = storage_of(7, disorder=True)
    cache = paged(storage, batch=2)
    _, k, v = draw(13, batch=2)
    cache.append(0, k, v, lengths=[13, 2])
    table = cache.block_table(width=9, fill=fill)
    assert table.dtype == torch.int32 and table.shape == (2, 9)
    assert (
        table[0, :4].tolist() == cache._tables.ids(0) and (table[0, 4:] == fill).all() and table[1, 1] == fill
    )
    for n in (0, 1, 3, 4, 5, 13):
        got = gather(storage.k[0], table, n)
        assert got.shape == (2, 2, n, 32)
        assert torch.equal(got[0], k[0, :, :n]) and torch.equal(got[1, :, :2], k[1, :, : min(n, 2)])


def test_the_kernels_layout_is_a_view_of_the_store():
    storage = storage_of(5, disorder=True)
    cache = paged(storage)
    _, k, v = draw(9)
    cache.append(1, k, v)
    for view, x in ((storage.k_cache(1), k), (storage.v_cache(1), v)):
        assert view.shape == (5, SIZE, 2, 32)
        for p in range(9):
            block, offset = divmod(cache._tables.table(0).slot(p), SIZE)
            assert torch.equal(view[block, offset], x[0, :, p])
    assert storage.k_cache(1).untyped_storage().data_ptr() == storage.k[1].untyped_storage().data_ptr()


# --- forks and shared prefixes ----------------------------------------------------------------------------


def test_a_fork_copies_the_partial_block_when_one_of_the_two_writes():
    storage = storage_of(8, poison=True)
    one, plain_one = paged(storage), plain()
    step([plain_one, one], *draw(6))
    two, plain_two = one.fork(), plain_one.fork()
    assert storage.manager.num_free == 6
    step([plain_two, two], *draw(1, seed=1))
    step([plain_one, one], *draw(1, seed=2))
    assert storage.manager.num_free == 5
    assert one._tables.ids(0)[0] == two._tables.ids(0)[0] and one._tables.ids(0)[1] != two._tables.ids(0)[1]
    step([plain_two, two], *draw(4, seed=3))
    step([plain_one, one], *draw(4, seed=4))
    one.crop(3), plain_one.crop(3)
    step([plain_one, one], *draw(2, seed=5))  # into what was the shared full block
    step([plain_two, two], *draw(1, seed=6))
    storage.manager.pool.check()
    one.free(), two.free()
    assert storage.manager.num_free == 8


def test_a_row_that_grows_in_the_manager_is_followed():
    """The manager gives the next blocks, not neighbours, between two attends: no stale table."""
    storage = storage_of(12, poison=True, disorder=True)
    manager = storage.manager
    seq = manager.allocate([1, 2, 3])
    cache, twin = paged(storage, sequences=[seq]), plain()
    step([twin, cache], *draw(3))
    for t in range(12):
        storage.copy(manager.append(seq, t))
        step([twin, cache], *draw(1, seed=t + 1))
        manager.register(seq)
        manager.check()
    # A fork of the sequence alone makes the next append replace a block.
    manager.crop(seq, 14), cache.crop(14), twin.crop(14)
    other = manager.fork(seq)
    storage.copy(manager.append(seq, 99))
    step([twin, cache], *draw(1, seed=50))
    manager.free(other)
    cache.free()
    manager.check()
    assert manager.num_free == 12


def test_a_crop_beyond_what_is_stored_leaves_the_sequence_alone():
    storage = storage_of(6)
    seq = storage.manager.allocate(range(9))
    cache = paged(storage, sequences=[seq])
    cache.crop(99)
    cache.crop(9)
    assert len(seq) == 9 and cache.row_lengths() == [0]
    step([plain(), cache], *draw(9))


def test_a_crop_when_only_a_later_layer_is_written():
    cache = paged(storage_of(6))
    _, k, v = draw(9)
    cache.append(1, k, v)
    cache.crop(7)
    assert cache.row_lengths(1) == [7] and torch.equal(cache.read(1)[0], k[:, :, :7])


def test_a_row_that_outgrows_its_sequence_is_refused():
    storage = storage_of(6)
    cache = paged(storage, sequences=[storage.manager.allocate([1, 2, 3])])
    before = state(cache)
    with pytest.raises(ValueError, match="sequences: .*manager.append"):
        cache.append(0, *draw(4)[1:])
    assert_same(before, state(cache))
    storage.manager.check()


@pytest.fixture(scope="module")
def tiny():
    """A tiny Llama with random weights in float64, as a decoder."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=0,
    )
    return from_transformers(transformers.LlamaForCausalLM(config).eval().double())


class Server:
    """What a server does with a prompt: look, run what is not cached, make it findable."""

    def __init__(self, model, num_blocks=24):
        self.model = model
        self.storage = PagedStorage(model.spec, num_blocks=num_blocks, block_size=SIZE, dtype=torch.float64)

    def __call__(self, prompt, extra=(), keep=False):
        manager = self.storage.manager
        seq = manager.allocate(prompt, extra)
        shared = seq.shared
        cache = PagedCache(
            self.model.spec, max_tokens=64, dtype=torch.float64, storage=self.storage, sequences=[seq]
        )
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt[shared:]]), cache, logits="last")[0, 0]
        manager.register(seq)
        manager.check()
        if not keep:
            cache.free()
            manager.check()
        return logits, shared


@pytest.mark.parametrize("n", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1, 19])
@pytest.mark.parametrize("keep", [False, True], ids=["freed", "live"])
def test_the_same_prompt_twice_gives_the_same_logits(tiny, n, keep):
    """PG-03. The hit is at most n - 1, so the last token is always run."""
    prompt = [(7 * i + 3) % 300 for i in range(n)]
    server = Server(tiny)
    first, hit = server(prompt, keep=keep)
    assert hit == 0
    again, hit = server(prompt, keep=keep)
    assert hit == (n - 1) // SIZE * SIZE <= n - 1
    torch.testing.assert_close(again, first, rtol=0, atol=1e-12)
    third, same = server(prompt, keep=keep)
    assert same == hit and torch.equal(third, again)
    whole = tiny(torch.tensor([prompt]), logits="last")[0, 0]
    torch.testing.assert_close(first, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shared", [SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 11])
def test_prompts_that_begin_alike(tiny, shared):
    server = Server(tiny)
    base = list(range(20, 40))
    server(base)
    other = base[:shared] + [250] * 6
    logits, hit = server(other)
    assert hit == shared // SIZE * SIZE
    want = tiny(torch.tensor([other]), logits="last")[0, 0]
    torch.testing.assert_close(logits, want, rtol=0, atol=1e-12)


def test_prompts_that_differ_only_in_salt_never_share(tiny):
    server, prompt = Server(tiny, num_blocks=40), list(range(30, 47))
    runs = [server(prompt, extra, keep=keep) for keep in (True, False) for extra in ((), ("a",), ("b",))]
    assert [hit for _, hit in runs] == [0, 0, 0, 16, 16, 16]
    ids = [set(s.table.ids) for s in server.storage.manager.sequences]
    assert len(ids) == 3 and not ids[0] & ids[1] and not ids[0] & ids[2] and not ids[1] & ids[2]


def test_blocks_that_are_evicted_and_recycled_are_not_found(tiny):
    server = Server(tiny, num_blocks=5)
    prompts = [[s] * 17 for s in (5, 9, 5, 9)]
    for p in prompts:
        logits, hit = server(p)
        assert hit == 0  # five blocks each: every prompt throws the other out
        torch.testing.assert_close(logits, tiny(torch.tensor([p]), logits="last")[0, 0], rtol=0, atol=1e-12)
    assert server.storage.manager.num_free == 5


# --- the real model ---------------------------------------------------------------------------------------


def test_greedy_tokens_of_the_real_model(smollm2):
    """Margins by the model itself; wherever the two best differ by more than 1e-3, all kinds choose alike."""
    model, tokenizer = smollm2
    prompt = tokenizer.encode("The cache of a language model holds")
    base = generate(model, prompt, max_new_tokens=12, stop_ids=())
    ids = torch.tensor([prompt + base.tokens[:-1]])
    top = model(ids)[0, len(prompt) - 1 :].topk(2).values
    sure = (top[:, 0] - top[:, 1] > 1e-3).tolist()
    until = sure.index(False) if False in sure else 12
    assert until >= 8
    storage = PagedStorage(model.spec, num_blocks=9, block_size=SIZE)
    pool = storage.manager.pool
    ids = pool.allocate(9)
    pool.free(ids[::2] + ids[1::2])
    room = {"max_tokens": 32}
    for cache in (
        make_cache("paged", model.spec, storage=storage, **room),
        make_cache("quantized", model.spec, codec="int8", residual=32, **room),
    ):
        got = generate(model, prompt, cache=cache, max_new_tokens=12, stop_ids=())
        assert got.tokens[:until] == base.tokens[:until]


# --- bad input --------------------------------------------------------------------------------------------


def test_a_pool_too_small_stores_nothing_and_leaves_other_rows_as_they_are():
    storage = storage_of(5, poison=True)
    cache, twin = paged(storage, batch=3), plain(batch=3)
    step([twin, cache], *draw(6, batch=3, nan_from=[6, 2, 3]), [6, 2, 3])
    before = state(cache)
    q, k, v = draw(6, batch=3, seed=1)
    for lengths in (None, [0, 3, 2], [3, 0, 2], [2, 2, 6]):
        with pytest.raises(PoolFull, match="blocks are needed and 1 are free"):
            cache.append(0, k, v, lengths=lengths)
        assert_same(before, state(cache))
        storage.manager.pool.check()
    step([twin, cache], q[:, :, :2], k[:, :, :2], v[:, :, :2], [2, 2, 1])


def test_a_full_pool_in_the_middle_of_copies_on_write_loses_no_token():
    """Row 0 could have its copy, row 1 not: neither may happen."""
    storage = storage_of(5, poison=True)
    cache, twin = paged(storage, batch=2), plain(batch=2)
    step([twin, cache], *draw(2 * SIZE - 1, batch=2))  # two blocks each
    fork = cache.fork()
    before = state(cache), state(fork)
    q, k, v = draw(1, batch=2, seed=1)
    with pytest.raises(PoolFull):
        cache.append(0, k, v)
    assert_same(before[0], state(cache))
    assert_same(before[1], state(fork))
    assert all(torch.equal(cache.read(i)[0], twin._k[i][:, :, :7]) for i in range(2))
    fork.free()
    step([twin, cache], q, k, v)
    cache.free()
    storage.manager.pool.check()
    assert storage.manager.num_free == 5


def test_two_rows_that_share_a_block_need_one_copy():
    storage = storage_of(2)
    one = paged(storage)
    step([plain(), one], *draw(2))
    table = one._tables.table(0)
    cache = paged(storage, batch=2, sequences=[table, table.fork()])
    twin = plain(batch=2)
    _, k, v = draw(2)
    for layer in range(2):
        twin.append(layer, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1))
    step([twin, cache], *draw(2, batch=2, seed=1))
    assert storage.manager.num_free == 0
    storage.manager.pool.check()


def test_more_than_the_pool_could_ever_give():
    cache = paged(storage_of(2), batch=2)
    before = state(cache)
    with pytest.raises(ValueError, match="12 tokens take 3 blocks and the pool has 2") as error:
        cache.append(0, *draw(12, batch=2)[1:])
    assert not isinstance(error.value, PoolFull)
    assert_same(before, state(cache))


def test_after_free():
    storage = storage_of(4)
    cache = paged(storage)
    step([plain(), cache], *draw(5))
    cache.free()
    for call in (cache.fork, cache.free, lambda: cache.append(0, *draw(1)[1:]), lambda: cache.crop(0)):
        with pytest.raises(ValueError, match="freed"):
            call()
        storage.manager.pool.check()
        assert storage.manager.num_free == 4


def test_sequences_that_do_not_belong():
    storage, other = storage_of(4), BlockManager(4, SIZE)
    freed = BlockTable(storage.manager.pool)
    freed.free()
    table = BlockTable(storage.manager.pool)
    cases = [[other.allocate([1])], [BlockTable(other.pool)], [freed], [table, table]]
    for sequences in cases:
        with pytest.raises(ValueError, match="sequences"):
            paged(storage, batch=len(sequences), sequences=sequences)
    with pytest.raises(ValueError, match="sequences must .* batch=2 entries, got 1"):
        paged(storage, batch=2, sequences=[table])
    storage.manager.check()


@pytest.mark.parametrize(
    "kind, more, message",
    [
        ("paged", {"page_size": 16}, "option .* got 'page_size'"),
        ("paged", {"residual": 16}, "option .* got 'residual'"),
        ("contiguous", {"block_size": 16}, "option .* got 'block_size'"),
        ("latent", {"step": 2}, "option .* got 'step'"),
        ("paged", {"block_size": 0}, r"block_size must .* got 0"),
        ("paged", {"num_blocks": 0}, r"num_blocks must .* got 0"),
        ("paged", {"num_blocks": True}, r"num_blocks must .* got True"),
        ("paged", {"storage": storage_of(2, spec=WINDOWED)}, "storage must"),
        ("paged", {"storage": PagedStorage(SPEC, num_blocks=2)}, "storage must .* got tiny in torch.float32"),
    ],
)
def test_make_cache_refuses(kind, more, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        make_cache(kind, SPEC, max_tokens=8, dtype=torch.float64, **more)


def test_mismatched_tensors_are_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    cache = paged(storage_of(4))
    step([plain(), cache], *draw(5))
    before = state(cache)
    _, k, v = draw(2, seed=1)
    for args, options, name in (
        ((0, k[:, :1], v), {}, "k must be of shape"),
        ((0, k, v[..., :16]), {}, "v must be of shape"),
        ((0, k, v.float()), {}, "v must .* dtype"),
        ((0, k, None), {}, "v must .* got None"),
        ((2, k, v), {}, "layer must .* got 2"),
        ((0, k, v), {"lengths": [3]}, "lengths must"),
        ((0, *draw(40)[1:]), {}, "max_tokens="),
    ):
        with pytest.raises(ValueError, match=name):
            cache.append(*args, **options)
        assert_same(before, state(cache))
    for n in (-1, [1, 2], 1.5):
        with pytest.raises(ValueError, match="n must be a count"):
            cache.crop(n)
        assert_same(before, state(cache))


def test_bytes_are_allocated_once():
    storage = storage_of(6)
    cache = paged(storage)
    pointers = [t.data_ptr() for t in (*storage.k, *storage.v)]
    assert cache.nbytes == storage.nbytes == sum(t.nbytes for t in (*storage.k, *storage.v))
    assert cache.nbytes == 6 * SIZE * 2 * 2 * 2 * 32 * 8
    for n in range(1, 25):
        step([cache], *draw(1, seed=n))
        assert cache.nbytes_used == n * 2 * 2 * 2 * 32 * 8
    assert [t.data_ptr() for t in (*storage.k, *storage.v)] == pointers and cache.nbytes == storage.nbytes
