"""The tokenizer against a byte-pair encoder of twenty lines, against transformers, and with hostile text."""

import json

import jaxtyping
import pytest
import regex
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tinymodels import MERGES, byte_tokens

from companion.model import Tokenizer
from companion.model.files import GGUF
from companion.model.files import smollm2 as path_of_smollm2
from tests.model.test_folder import backend

GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
QUICK = settings(max_examples=150, deadline=None, database=None, derandomize=True)
ABSENT = "\x04\x06\x13\x14\x16\x1d"  # control characters that SmolLM2's vocabulary has no token for
# Nor for the first byte of characters in planes that Unicode leaves empty.
CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters=ABSENT)
TEXT = st.text(CHARACTERS.filter(lambda c: not 0x40000 <= ord(c) < 0xC0000), max_size=60)
# What is a letter is agreed between versions of Unicode only for characters that are not new.
OLD = st.characters(exclude_categories=("Cs", "Cn", "Co"), exclude_characters=ABSENT)
WORDS = "the| in|12|3| |\n|\n\n|  |'s|don't|é|漢|🙂|\t|½|٣|x1y".split("|")
MIXED = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)
SAMPLES = [
    "The capital of France is",
    "In 2023, 1,024 tokens\n\n1. one\n 22 two",
    "def fib(n):\n    return n",
    "don't we're I'll 'tis",
    "漢字 and ½ and Ⅷ and ٣٤",
    "a\u00a0b\u2003c \r\n\t d  ",
    "👩‍👩‍👧 é e\u0301 \U0001f1eb\U0001f1f7",
    "\x00\x01\x7f",
]


class OwnBPE:
    """Split digits off, split by GPT-2's pattern, then merge bytes, best rank first."""

    def __init__(self, tokens, merges):
        letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in letters]
        self.letter = {b: chr(b) for b in letters} | {b: chr(256 + i) for i, b in enumerate(others)}
        self.ids = {t: i for i, t in enumerate(tokens)}
        self.rank = {tuple(m.split(" ", 1)): i for i, m in enumerate(merges)}

    def encode(self, text):
        out = []
        for part in regex.findall(r"\p{N}|[^\p{N}]+", text):
            for word in GPT2.findall(part):
                out += [self.ids[t] for t in self.merge([self.letter[b] for b in word.encode()])]
        return out

    def merge(self, word):
        while len(word) > 1:
            at = min(range(len(word) - 1), key=lambda i: self.rank.get((word[i], word[i + 1]), 1e9))
            if (word[at], word[at + 1]) not in self.rank:
                break
            word = [*word[:at], word[at] + word[at + 1], *word[at + 2 :]]
        return word


@pytest.fixture(scope="module")
def meta():
    with GGUF(path_of_smollm2()) as file:
        return file.meta


@pytest.fixture(scope="module")
def tokenizer(meta):
    return Tokenizer.from_gguf(meta)


@pytest.fixture(scope="module")
def own(meta):
    return OwnBPE(meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.merges"])


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SAMPLES)
def test_ids_are_those_of_a_plain_byte_pair_encoder(tokenizer, own, text):
    assert tokenizer.encode(text, special=False) == own.encode(text)


@QUICK
@given(st.text(OLD, max_size=60) | MIXED)
def test_ids_of_any_text(tokenizer, own, text):
    assert tokenizer.encode(text, special=False) == own.encode(text)


def test_every_digit_is_a_token(tokenizer):
    for text in ("2018-01-22 12:12:53", "1234567890", " 42", "x64", "\n\n1"):
        pieces = [tokenizer.token(i) for i in tokenizer.encode(text)]
        digits = [c for c in text if c.isdigit()]
        assert [p for p in pieces if any(c.isdigit() for c in p)] == digits
    # With GPT-2's pattern alone a line break would keep to itself before the digit: three tokens, not two.
    assert len(tokenizer.encode("\n\n1")) == len(tokenizer.encode("\n\n")) + 1


@pytest.mark.parametrize("pre, want", [("smollm", ["Ġ", "1", "2", "t"]), ("gpt-2", ["Ġ", "12", "t"])])
def test_the_split_is_the_one_that_the_file_names(pre, want):
    """A vocabulary that could merge two digits, and does where the pattern lets it."""
    meta = {"tokens": byte_tokens(), "token_type": [3] * 3 + [1] * 297, "merges": MERGES}
    meta = {f"tokenizer.ggml.{k}": v for k, v in (meta | {"model": "gpt2", "pre": pre}).items()}
    tokenizer = Tokenizer.from_gguf(meta)
    assert [tokenizer.token(i) for i in tokenizer.encode(" 12t")] == want


# --- there and back -------------------------------------------------------------------------------


@QUICK
@given(TEXT | MIXED)
@example("")
@example("<|im_end|> <|endoftext|>")
@example("\ufffd")
def test_round_trip_of_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


@QUICK
@given(TEXT, TEXT)
def test_special_tokens_are_tokens_or_text_as_asked(tokenizer, before, after):
    text = before + "<|im_end|>" + after
    ids = tokenizer.encode(text)
    plain = tokenizer.encode(text, special=False)
    assert ids.count(2) == 1 + (before + after).count("<|im_end|>") and 2 not in plain
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(ids, special=True) == text
    assert "<|im_end|>" not in tokenizer.decode(ids)


def test_asking_for_plain_text_once_does_not_last(tokenizer):
    tokenizer.encode("<|im_end|>", special=False)
    assert tokenizer.encode("<|im_end|>") == [2]


def test_bytes_without_a_token_are_dropped(tokenizer, meta):
    for c in ABSENT:
        assert tokenizer.encode(c) == [] and tokenizer.decode(tokenizer.encode(f"a{c}b")) == "ab"
    own = OwnBPE(meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.merges"])
    assert {chr(b) for b in range(128) if own.letter[b] not in own.ids} == set(ABSENT)


def test_the_special_ids_of_the_real_model(tokenizer, meta):
    assert tokenizer.vocab == 49152 == len(meta["tokenizer.ggml.tokens"])
    assert set(tokenizer.eos_ids) == {0, 2} and tokenizer.eos_ids[0] == 2
    assert tokenizer.bos_id is None
    assert [tokenizer.token(i) for i in (0, 1, 2)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_half_a_character_decodes_to_the_replacement_mark(tokenizer):
    ids = tokenizer.encode("🙂", special=False)
    if len(ids) > 1:
        assert tokenizer.decode(ids[:-1]).endswith("\ufffd")
    assert tokenizer.decode(ids) == "🙂"


@pytest.mark.parametrize("id", [-1, 49152, 10**6])
def test_ids_outside_the_vocabulary(tokenizer, id):
    with pytest.raises(ValueError, match=f"id must .* to 49151, got {id}"):
        tokenizer.token(id)


# --- chat -----------------------------------------------------------------------------------------


def hf_chat(tokenizer, messages, prompt):
    """The text that transformers renders from the same template."""
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    theirs.chat_template = tokenizer.template
    return theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


USER = {"role": "user", "content": "What is 2 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
REPLY = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [SYSTEM, USER, REPLY, USER], [USER, REPLY]])
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_is_what_transformers_renders(tokenizer, messages, prompt):
    assert tokenizer.chat(messages, prompt=prompt) == hf_chat(tokenizer, messages, prompt)


def test_chat_by_hand(tokenizer):
    assert tokenizer.chat([SYSTEM, USER]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    text = tokenizer.chat([USER])  # the model's own system message comes first
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text)
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2
    assert tokenizer.decode(ids, special=True) == text


def of_template(template):
    return Tokenizer(backend(), eos_ids=[0], template=template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% if %}",
        "{{ messages[7]['content'] }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 'x' }}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_that_fail_or_reach_out(template):
    with pytest.raises(ValueError, match="chat template"):
        of_template(template).chat([USER])


def test_a_model_without_a_template():
    with pytest.raises(ValueError, match="no chat template"):
        of_template(None).chat([USER])


# --- LD-12: one begin token, not two --------------------------------------------------------------


def made_up(tmp_path, *, processor=False, **config):
    """A folder whose begin token is <|im_start|>, id 1, asked for in one way or another."""
    one = backend("<|im_start|>" if processor else None)
    one.save(str(tmp_path / "tokenizer.json"))
    tokens = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens | config))
    return Tokenizer.from_folder(tmp_path)


WITH_BOS = [dict(add_bos_token=True), dict(processor=True), dict(processor=True, add_bos_token=True)]


@pytest.mark.parametrize("how", WITH_BOS)
def test_a_begin_token_comes_exactly_once(tmp_path, how):
    tokenizer = made_up(tmp_path, chat_template="{{ bos_token }}{{ messages[0]['content'] }}", **how)
    plain = tokenizer.encode("the inn", special=False)
    assert tokenizer.bos_id == 1 and plain[0] == 1 and plain.count(1) == 1
    assert tokenizer.encode("the inn") == plain
    templated = tokenizer.chat([{"role": "user", "content": "the inn"}])
    assert templated == "<|im_start|>the inn"
    assert tokenizer.encode(templated) == plain
    assert tokenizer.encode("") == [1]
    assert tokenizer.decode(plain) == "the inn"
    # A user who types the marker gets its letters, behind the one begin token.
    typed = tokenizer.encode("<|im_start|>", special=False)
    assert typed.count(1) == 1 and tokenizer.decode(typed) == "<|im_start|>"
    assert tokenizer.eos_ids == (2,)


@pytest.mark.parametrize(
    "how", [dict(), dict(add_bos_token=False), dict(processor=True, add_bos_token=False)]
)
def test_no_begin_token_where_none_is_asked_for(tmp_path, how):
    tokenizer = made_up(tmp_path, **how)
    assert tokenizer.bos_id is None and 1 not in tokenizer.encode("the inn")


@pytest.mark.parametrize("how", [dict(), dict(processor=True)])
@pytest.mark.parametrize("text", SAMPLES)
def test_a_folder_encodes_as_transformers_does(tmp_path, how, text):
    tokenizer = made_up(tmp_path, **how)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode(text) == theirs(text)["input_ids"]


def test_begin_token_of_a_gguf(meta):
    tokens = meta["tokenizer.ggml.tokens"]
    for flag, want in ((True, 1), (False, None)):
        changed = meta | {"tokenizer.ggml.add_bos_token": flag, "tokenizer.ggml.bos_token_id": 1}
        tokenizer = Tokenizer.from_gguf(changed)
        assert tokenizer.bos_id == want
    assert tokens[1] == "<|im_start|>"


def test_end_tokens_are_collected_from_every_file(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    assert made_up(tmp_path).eos_ids == (7, 2, 0)


def test_a_template_in_a_file_of_its_own(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert made_up(tmp_path).chat([{"role": "user", "content": "Grüße"}]) == "Grüße!"


def test_surrogates_are_refused(tokenizer, monkeypatch):
    """What a command line makes of bytes that are not UTF-8."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError):
        tokenizer.encode("a\udcffb")
