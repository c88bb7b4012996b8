"""The GGUF reader against the `gguf` package: every type bit for bit, and files that are cut or corrupted."""

import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from hypothesis import given, settings
from hypothesis import strategies as st

import companion
from companion.model.files import GGUF, TYPES, dequantize

KINDS = [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q8_0]


def write(path, tensors, version_bytes=None, **meta):
    """tensors: name -> (raw array, type). meta: key -> (method suffix, value)."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, (kind, value) in meta.items():
        getattr(writer, f"add_{kind}")(key, value)
    for name, (raw, kind) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same_bits(a, b):
    assert a.dtype == b.dtype == np.float32 and a.shape == b.shape
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


# --- numbers --------------------------------------------------------------------------------------


def test_the_types_are_the_packages():
    for kind, (name, per_block, size) in TYPES.items():
        assert Q(kind).name == name
        assert gguf.GGML_QUANT_SIZES[Q(kind)] == (per_block, size)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 3, 32), (2, 1, 2, 96)])
def test_every_type_dequantizes_as_the_gguf_package_does(tmp_path, kind, shape):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, shape)).astype(np.float32)
    x.reshape(-1)[:32] = 0  # a block of zeros has scale 0
    raw = gguf.quants.quantize(x, kind)
    with GGUF(write(tmp_path / "x.gguf", {"t": (raw, kind)})) as file:
        got = file.tensor("t")
    assert same_bits(got, gguf.quants.dequantize(raw, kind))
    assert got.shape == shape
    got[...] = 1  # an array of its own: writable, and alive after the file is closed


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0, Q.F16, Q.BF16], ids=lambda k: k.name)
def test_any_bytes_dequantize_as_the_gguf_package_does(kind):
    """Not only what a quantizer writes: all nibbles and bytes, with random finite scales."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (256, size), dtype=np.uint8)
    for at in range(0, {Q.Q4_0: 2, Q.Q4_1: 4, Q.Q8_0: 2}.get(kind, 0), 2):
        raw[:, at : at + 2] = rng.standard_normal((256, 1)).astype(np.float16).view(np.uint8)
    got = dequantize(int(kind), raw.reshape(-1))
    want = gguf.quants.dequantize(raw, kind).reshape(-1)
    finite = np.isfinite(want)
    assert np.array_equal(got[finite], want[finite]) and finite.mean() > 0.9
    assert np.array_equal(np.isnan(got), np.isnan(want))


def test_ld_04_first_half_low_nibbles_second_half_high():
    block = struct.pack("<e", 1.0) + bytes(j | (15 - j) << 4 for j in range(16))
    got = dequantize(2, np.frombuffer(block, np.uint8))
    assert got.tolist() == [j - 8 for j in range(16)] + [7 - j for j in range(16)]
    eight = struct.pack("<e", 0.5) + struct.pack("<32b", *range(-16, 16))
    assert dequantize(8, np.frombuffer(eight, np.uint8)).tolist() == [q / 2 for q in range(-16, 16)]


def test_the_header_as_the_gguf_package_reads_it(tmp_path):
    meta = {
        "general.alignment": ("custom_alignment", 64),
        "a.u8": ("uint8", 200),
        "a.i8": ("int8", -5),
        "a.u16": ("uint16", 60000),
        "a.i16": ("int16", -30000),
        "a.u32": ("uint32", 4_000_000_000),
        "a.i32": ("int32", -2_000_000_000),
        "a.u64": ("uint64", 2**63),
        "a.i64": ("int64", -(2**62)),
        "a.f32": ("float32", 0.1),
        "a.f64": ("float64", 0.1),
        "a.yes": ("bool", True),
        "a.text": ("string", "Größe 🙂"),
        "a.strings": ("array", ["", "a", "ß"]),
        "a.floats": ("array", [1.5, -2.5]),
        "a.ints": ("array", [1, 2, 3]),
        "a.bools": ("array", [True, False]),
        "a.nested": ("array", [[1, 2], [3, 4]]),
    }
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, (kind, value) in meta.items():
        if kind == "custom_alignment":
            writer.add_custom_alignment(value)
        else:
            getattr(writer, f"add_{kind}")(key, value)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y = np.arange(5, dtype=np.float16)
    writer.add_tensor("x", x)
    writer.add_tensor("y", y)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUF(tmp_path / "m.gguf") as file:
        for key, (_, value) in meta.items():
            want = float(np.float32(value)) if key == "a.f32" else value
            assert file.meta[key] == want, key
        reader = gguf.GGUFReader(tmp_path / "m.gguf")
        assert {t.name: t.data_offset for t in reader.tensors} == {
            n: e.start for n, e in file.entries.items()
        }
        assert file.tensor("x").tolist() == x.tolist()
        assert file.tensor("y").tolist() == y.tolist()


# --- files that are not whole ---------------------------------------------------------------------


def test_what_is_no_gguf(tmp_path):
    path = tmp_path / "x.gguf"
    for content in (b"", b"GGUF", b"GGUF" + bytes(19)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.gguf: too short"):
            GGUF(path)
    for content, message in (
        (b"PK\x03\x04" + bytes(60), "not a GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(60), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63) + bytes(60), "keys"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"x\.gguf: .*{message}"):
            GGUF(path)
    with pytest.raises(ValueError, match="no such file"):
        GGUF(tmp_path / "absent.gguf")
    with pytest.raises(ValueError, match="no such file"):
        GGUF(tmp_path)


def pair(key, kind, value):
    """One key and value as bytes, by hand."""
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    "body, message",
    [
        (pair(b"a", 8, struct.pack("<Q", 2**62)), "string of"),
        (pair(b"a", 8, struct.pack("<Q", 2) + b"\xff\xfe"), "UTF-8"),
        (pair(b"a", 13, bytes(8)), "value of type 13"),
        (pair(b"a", 9, struct.pack("<IQ", 8, 2**61)), "array of"),
        (pair(b"a", 9, struct.pack("<IQ", 0, 2**40)), "array of"),
        (pair(b"a", 9, struct.pack("<IQ", 77, 1) + bytes(30)), "value of type 77"),
        (pair(b"a", 9, struct.pack("<IQ", 9, 1) * 6 + bytes(30)), "value of type 9"),
        (pair(b"general.alignment", 4, struct.pack("<I", 0)), "alignment"),
        (pair(b"general.alignment", 8, struct.pack("<Q", 1) + b"x"), "alignment"),
    ],
)
def test_corrupted_pairs(tmp_path, body, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + body + bytes(40))
    with pytest.raises(ValueError, match=rf"x\.gguf: .*{message}"):
        GGUF(path)


@pytest.mark.parametrize(
    "dims, kind, offset, message",
    [
        ([4] * 5, 0, 0, "dimensions"),
        ([2**40, 2**40], 0, 0, "ends beyond"),
        ([2**63], 0, 0, "ends beyond"),
        ([4], 0, 2**62, "ends beyond"),
        ([33], 2, 0, "no multiple of 32"),
        ([32], 12, 0, "type 12; accepted: F32, F16, Q4_0, Q4_1, Q8_0, BF16"),
        ([32], 99, 0, "type 99"),
    ],
)
def test_corrupted_tensor_entries(tmp_path, dims, kind, offset, message):
    table = struct.pack("<Q", 1) + b"t" + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    path = tmp_path / "x.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + table + struct.pack("<IQ", kind, offset) + bytes(64)
    )
    with pytest.raises(ValueError, match=rf"x\.gguf: .*{message}"):
        GGUF(path)


@pytest.mark.parametrize("kind, value", [(Q.F32, math.nan), (Q.F16, math.inf), (Q.BF16, -math.inf)])
def test_numbers_that_are_none(tmp_path, kind, value):
    """The error is this one, not one about closing a file that is still being read."""
    x = np.ones(64, np.float32)
    x[7] = value
    path = write(tmp_path / "x.gguf", {"t": (gguf.quants.quantize(x, kind), kind)})
    with pytest.raises(ValueError, match="tensor 't' holds NaN or infinity"):
        with GGUF(path) as file:
            file.tensor("t")
    with pytest.raises(ValueError, match="no tensor 'u'"):
        with GGUF(path) as file:
            file.tensor("u")


def test_an_empty_tensor(tmp_path):
    table = struct.pack("<Q", 1) + b"t" + struct.pack("<I2Q", 2, 0, 3) + struct.pack("<IQ", 0, 0)
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + table + bytes(64))
    with GGUF(path) as file:
        assert file.tensor("t").shape == (3, 0)


def needed_bytes(path):
    return max(t.data_offset + t.n_bytes for t in gguf.GGUFReader(path).tensors)


def test_a_file_cut_anywhere_is_one_clear_error(tiny_gguf):
    path, _ = tiny_gguf()
    whole, needed = path.read_bytes(), needed_bytes(path)
    header = min(t.data_offset for t in gguf.GGUFReader(path).tensors)
    cuts = [*range(0, 300), *range(300, header, 29), *range(header, needed, 4999), needed - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"tiny\.gguf"):
            GGUF(path)
    path.write_bytes(whole[:needed])  # the padding at the end is nobody's
    GGUF(path).close()


@settings(max_examples=300, deadline=None, database=None)
@given(st.binary(max_size=300), st.integers(0, 3), st.integers(0, 3))
def test_garbage_after_a_sane_beginning(tmp_path_factory, body, tensors, pairs):
    path = tmp_path_factory.getbasetemp() / "garbage.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + body)
    try:
        GGUF(path).close()
    except ValueError:
        pass


def test_flipped_bytes_raise_nothing_but_value_error(tiny_gguf):
    """In a process of its own, whose memory is capped: a wild length must not be allocated."""
    path, _ = tiny_gguf(kinds={"token_embd.weight": Q.Q8_0, "blk.0.ffn_up.weight": Q.Q4_1})
    header = min(t.data_offset for t in gguf.GGUFReader(path).tensors)
    script = Path(__file__).parents[1] / "helpers" / "flip_bytes.py"
    done = subprocess.run(
        [sys.executable, str(script), str(path), str(header)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(companion.__file__).parents[1])},
        timeout=300,  # a hang, not a speed, is what this catches
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    opened, loaded, refused = map(int, done.stdout.split()[-3:])
    assert opened + loaded + refused > 1000 and refused > 100
