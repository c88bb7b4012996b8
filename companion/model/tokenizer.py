"""Text to token ids and back, by the `tokenizers` library; chat templates by jinja2.

A byte-level BPE splits text into pieces by a pattern before it merges bytes. The pattern is part of the
model: SmolLM2 was trained with every digit on its own, and without that split the same merges give other ids.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ..checks import require, whole

# llama.cpp's names of pre-tokenizers, with what they split on before the bytes.
PATTERNS = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "gpt-2": [],
}
_CONTROL = 3  # GGUF's token type for special tokens
# Tokens that end a reply in some checkpoints although only one id is declared as the end.
_ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "</s>")


class Tokenizer:
    """`encode`, `decode` and `chat`.

    Attributes: `eos_ids`, tokens that end a reply; `bos_id` (None: this model wants none); `vocab` size;
    `template`, the chat template or None.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: Iterable[int],
        bos_id: int | None = None,
        template: str | None = None,
        names: dict[str, str] | None = None,
    ):
        self._backend, self.bos_id, self.template = backend, bos_id, template
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self._names = names or {}
        self.vocab = backend.get_vocab_size()

    @classmethod
    def from_gguf(cls, meta: dict[str, Any]) -> "Tokenizer":
        """From a GGUF header. Raises ValueError for a tokenizer that is no byte-level BPE known here."""
        kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "gpt-2")
        if kind != "gpt2" or pre not in PATTERNS:
            known = ", ".join(PATTERNS)
            raise ValueError(
                f"tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported; accepted: gpt2 with {known}"
            )
        tokens, types, pairs = (
            _listed(meta, *x) for x in (("tokens", str), ("token_type", int), ("merges", str))
        )
        if len(types) != len(tokens):
            raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        vocab = {text: i for i, text in enumerate(tokens)}
        merges = [tuple(m.split(" ", 1)) for m in _listed(meta, "merges", str)]
        with _sane("tokenizer.ggml.merges"):
            backend = Backend(models.BPE(vocab, merges, fuse_unk=False, byte_fallback=False))
        bytes_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*PATTERNS[pre], bytes_level])
        backend.decoder = decoders.ByteLevel()
        special = [text for text, kind in zip(tokens, types) if kind == _CONTROL]
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        eos, bos = (_one_of(meta, f"{end}_token_id", len(tokens)) for end in ("eos", "bos"))
        ends = [] if eos is None else [eos]
        ends += [vocab[t] for t in special if t in _ENDS]
        names = {
            "bos_token": tokens[bos] if bos is not None else "",
            "eos_token": tokens[eos] if eos is not None else "",
        }
        template = meta.get("tokenizer.chat_template")
        return cls(
            backend,
            eos_ids=ends,
            bos_id=bos if meta.get("tokenizer.ggml.add_bos_token") else None,
            template=template if isinstance(template, str) else None,
            names=names,
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """From `tokenizer.json`, with the folder's configuration files if they are there."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder}: no tokenizer.json")
        with _sane(str(path)):
            backend = Backend.from_file(str(path))
        config = _json(folder / "tokenizer_config.json")
        text = {k: _text(config.get(k)) for k in ("bos_token", "eos_token")}
        ends: list[int] = []
        for source in (_json(folder / "generation_config.json"), _json(folder / "config.json")):
            eos = source.get("eos_token_id")
            ends += eos if isinstance(eos, list) else [] if eos is None else [eos]
        if text["eos_token"]:
            ends.append(backend.token_to_id(text["eos_token"]))
        bos = backend.token_to_id(text["bos_token"]) if text["bos_token"] else None
        adds = config.get("add_bos_token")
        if adds is None:  # then tokenizer.json itself says what an encoded text begins with
            adds = bos is not None and backend.encode("").ids[:1] == [bos]
        template = config.get("chat_template")
        if template is None and (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(
            backend,
            eos_ids=[e for e in ends if e is not None],
            bos_id=bos if adds else None,
            template=template,
            names=text,
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; with the model's begin token in front, once, if it wants one.

        special: read markers such as <|im_end|> as tokens (True), or as the plain text of a user (False).
        Bytes that the vocabulary lacks are dropped (SmolLM2's lacks six control characters, U+001D for one).
        """
        self._backend.encode_special_tokens = not special
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise ValueError(f"text={text[:40]!r} cannot be written as UTF-8") from None
        if self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; special tokens are left out unless `special`."""
        return self._backend.decode(list(ids), skip_special_tokens=not special)

    def token(self, id: int) -> str:
        """The token as the vocabulary writes it (a space is shown as Ġ)."""
        text = self._backend.id_to_token(id) if id >= 0 else None
        require(text is not None, "id", f"one from 0 to {self.vocab - 1}", id)
        return text

    def chat(self, messages: Sequence[dict[str, str]], *, prompt: bool = True) -> str:
        """The text of a conversation by the model's own template.

        messages: dicts with "role" and "content". prompt: end where the assistant's reply begins.
        """
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # templates come out of downloaded files

        if self.template is None:
            raise ValueError("this model has no chat template; give it plain text")
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.globals["raise_exception"] = _refuse
        values = {
            "messages": list(messages),
            "add_generation_prompt": prompt,
            "tools": None,
            "documents": None,
        }
        try:
            return env.from_string(self.template).render(**values, **self._names)
        except ValueError:
            raise
        except Exception as e:  # it is a program that came with the weights: anything may go wrong in it
            raise ValueError(f"chat template: {e}") from None


def _listed(meta: dict[str, Any], name: str, kind: type) -> list:
    values = meta.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(x, kind) for x in values):
        raise ValueError(f"tokenizer.ggml.{name} must be a list of {kind.__name__}, got none")
    return values


def _one_of(meta: dict[str, Any], name: str, count: int) -> int | None:
    id = meta.get(f"tokenizer.ggml.{name}")
    return None if id is None else whole(f"tokenizer.ggml.{name}", id, 0, count - 1)


@contextmanager
def _sane(what: str) -> Iterator[None]:
    """The library raises bare exceptions for what it cannot read."""
    try:
        yield
    except Exception as e:
        raise ValueError(f"{what} cannot be read as a tokenizer: {e}") from None


def _refuse(message: str) -> None:
    raise ValueError(f"chat template: {message}")


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token or ""
