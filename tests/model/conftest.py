"""A tiny GGUF model for each test that asks for one."""

import pytest
from tinymodels import TinyGGUF, tiny


@pytest.fixture
def tiny_gguf(tmp_path):
    """make(...) -> (path, TinyGGUF); a whole small Llama with a byte-level tokenizer, as a GGUF file."""

    def make(hf=None, name="tiny.gguf", **changes):
        content = TinyGGUF(tiny("llama") if hf is None else hf, **changes)
        return content.write(tmp_path / name), content

    return make
