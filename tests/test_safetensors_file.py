"""The header reader: what it accepts is what the safetensors package accepts, and what it refuses it explains."""
import json
import os
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from k3cuda.errors import CheckpointError
from k3cuda.runtime.safetensors_file import DTYPE_BITS, MAX_HEADER, SafetensorsFile

MODEL = os.path.join(os.path.dirname(__file__), "data", "k3-headdims", "model.safetensors")
PROPERTY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def file_bytes(header, data=b"", length=None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def findings_of(tmp_path, content: bytes, name="a.safetensors"):
    path = tmp_path / name
    path.write_bytes(content)
    return SafetensorsFile.scan(path)[1]


def test_reads_what_the_package_reads():
    want, file = load_file(MODEL), SafetensorsFile.open(MODEL)
    assert {array.dtype for array in want.values()} == {np.dtype(t) for t in (np.float32, np.uint8, ml_dtypes.bfloat16)}
    assert file.tensors.keys() == want.keys()
    for name, array in want.items():
        got = file.array(name)
        assert got.dtype == array.dtype and got.shape == array.shape and got.tobytes() == array.tobytes(), name
        if array.ndim:
            assert file.array(name, slice(1, len(array))).tobytes() == array[1:].tobytes()


def test_arrays_outlive_close_and_may_be_misaligned(tmp_path):
    path = tmp_path / "odd.safetensors"
    header = {"a": entry("U8", (3,), (0, 3)), "b": entry("F32", (2,), (3, 11)), "c": entry("BF16", (), (11, 13)),
              "d": entry("U8", (0, 5), (13, 13))}
    path.write_bytes(file_bytes(header, bytes(3) + np.float32([1, 2]).tobytes() + b"\x80\x3f"))
    file = SafetensorsFile.open(path)
    b, c = file.array("b"), file.array("c")
    file.close()
    assert b.tolist() == [1, 2] and b.flags.aligned and float(c) == 1 and c.shape == () and file.array("d").shape == (0, 5)


GOOD = file_bytes({"x": entry()}, bytes(8))
EMPTY = json.dumps({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}).encode()
DAMAGE = {
    "zero bytes": (b"", "0 bytes"),
    "seven bytes": (b"1234567", "7 bytes"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n", "a Git LFS pointer"),
    "html": (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "an HTML or XML page"),
    "xml": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an HTML or XML page"),
    "zip": (b"PK\x03\x04" + bytes(100), "a GGUF or torch file"),
    "zeros": (bytes(100), "space set aside"),
    "length 10^12": (file_bytes(b"{}", length=10**12), "header length 1,000,000,000,000"),
    "length over 100 MB": (file_bytes(b"{}", length=MAX_HEADER + 1), "100,000,001"),
    "length beyond the file": (file_bytes(b"{}", length=100), "truncated by at least 98 bytes"),
    "no JSON": (file_bytes(b'{"x": '), "no JSON"),
    "not UTF-8": (file_bytes(b'{"\xff": 1}'), "no JSON"),
    "NaN": (file_bytes(b'{"x": NaN}'), "no JSON"),
    "long integer": (file_bytes(b'{"x": ' + b"1" * 5000 + b"}"), "no JSON"),
    "a list": (file_bytes(b"[1, 2]"), "begins with"),
    "deep lists": (file_bytes(b'{"x":' + b"[" * 5_000), "no JSON"),
    "many lists": (file_bytes(b'{"x":' + b"[" * 200_000), "200,000 lists"),
    "deep objects": (file_bytes(b'{"x":' * 5_000), "no JSON"),
    "many objects": (file_bytes(b'{"x":' * 200_000), "200,000 objects"),
    "duplicate": (file_bytes(b'{"x": %b, "x": %b}' % (EMPTY, EMPTY)), "1 repeated name: x"),
    "metadata": (file_bytes({"__metadata__": {"a": 1}, "x": entry()}, bytes(8)), "__metadata__"),
    "entry": (file_bytes({"x": 7}), "x with the entry 7"),
    "no dtype": (file_bytes({"x": {"shape": [1], "data_offsets": [0, 1]}}), "x with the entry"),
    "unknown dtype": (file_bytes({"x": entry("F33")}, bytes(8)), "x with dtype F33"),
    "dtype type": (file_bytes({"x": entry(["F32"])}, bytes(8)), "x with dtype ['F32']"),
    "negative shape": (file_bytes({"x": entry(shape=(-2,))}, bytes(8)), "shape [-2]"),
    "bool shape": (file_bytes({"x": entry("U8", (True,), (0, 1))}, bytes(1)), "shape [True]"),
    "float shape": (file_bytes({"x": entry(shape=(2.0,))}, bytes(8)), "shape [2.0]"),
    "huge shape": (file_bytes({"x": entry(shape=(2**63,))}, bytes(8)), "shape [9223372036854775808]"),
    "huge product": (file_bytes({"x": entry(shape=(2**40, 2**40))}, bytes(8)), "x with 8 bytes"),
    "text shape": (file_bytes({"x": entry() | {"shape": ""}}, bytes(8)), "x with shape"),
    "backward offsets": (file_bytes({"x": entry(offsets=(8, 0))}, bytes(8)), "data_offsets [8, 0]"),
    "one offset": (file_bytes({"x": entry(offsets=(8,))}, bytes(8)), "data_offsets [8]"),
    "bool offset": (file_bytes({"x": entry("U8", (1,), (False, True))}, bytes(8)), "data_offsets [False, True]"),
    "float offset": (file_bytes({"x": entry(offsets=(0, 8.0))}, bytes(8)), "data_offsets [0, 8.0]"),
    "too few bytes": (file_bytes({"x": entry(shape=(3,))}, bytes(8)), "x with 8 bytes for F32 [3]"),
    "overlap": (file_bytes({"x": entry(), "y": entry(offsets=(4, 12))}, bytes(12)), "y overlaps x by 4 bytes"),
    "same place": (file_bytes({"x": entry(), "y": entry()}, bytes(8)), "overlaps"),
    "gap": (file_bytes({"x": entry(), "y": entry(offsets=(12, 20))}, bytes(20)), "y leaves a gap after x by 4 bytes"),
    "gap at the start": (file_bytes({"x": entry(offsets=(4, 12))}, bytes(12)), "gap after the header by 4 bytes"),
    "truncated": (GOOD[:-3], "truncated by 3 bytes"),
    "over-long": (GOOD + bytes(5), "5 bytes too long"),
    "lone surrogate": (file_bytes(b'{"\\ud800": %b}' % EMPTY), "a name that is no text"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path, name):
    content, words = DAMAGE[name]
    findings = findings_of(tmp_path, content)
    assert [words in f.found for f in findings] == [True], findings
    finding = findings[0]
    assert finding.file == str(tmp_path / "a.safetensors") and finding.wanted and finding.way_out and finding.code == 3
    str(finding).encode()
    with pytest.raises(CheckpointError, match="a.safetensors") as caught:
        SafetensorsFile.open(finding.file)
    assert caught.value.code == 3 and caught.value.findings == (finding,)


def test_the_package_and_we_know_the_same_dtypes():
    assert {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64"} <= set(DTYPES)
    assert not official(file_bytes({"x": entry("F33")}, bytes(8)))


def test_all_problems_of_a_file_at_once(tmp_path):
    header = {"a": entry("F33"), "b": entry("F33"), "c": entry(shape=(-1,)), "d": entry(offsets=(3, 1)), "e": entry(shape=(5,)),
              "f": entry(offsets=(0, 8)), "g": entry(offsets=(4, 12)), "__metadata__": []}
    found = "\n".join(f.found for f in findings_of(tmp_path, file_bytes(header, bytes(10))))
    for words in ("a with dtype F33, and 1 more", "c with shape [-1]", "d with data_offsets [3, 1]", "e with 8 bytes", "g overlaps f",
                  "truncated by 2 bytes", "__metadata__"):
        assert words in found, words


def test_files_that_are_not_there_or_not_whole(tmp_path):
    def found(name):
        return SafetensorsFile.scan(tmp_path / name)[1][0].found

    (tmp_path / "x.safetensors.incomplete").write_bytes(b"half")
    (tmp_path / "y.safetensors").write_bytes(GOOD)
    (tmp_path / "y.safetensors.aria2").write_bytes(b"list")
    (tmp_path / "z.safetensors").symlink_to("nowhere")
    (tmp_path / "d.safetensors").mkdir()
    os.mkfifo(tmp_path / "p.safetensors")
    assert found("x.safetensors") == "an unfinished download (x.safetensors.incomplete)"
    assert found("x.safetensors.incomplete") == "an unfinished download (x.safetensors.incomplete)"
    assert found("y.safetensors") == "an unfinished download (y.safetensors.aria2)"
    assert found("z.safetensors") == "a link to nowhere, which does not exist"
    assert found("d.safetensors") == found("p.safetensors") == "no regular file"
    assert found("q.safetensors") == "no such file"
    assert "error on reading" in found("q" * 300 + ".safetensors") and "error on reading" in found("q\0.safetensors")
    cache = tmp_path / ".cache" / "huggingface" / "download"
    cache.mkdir(parents=True)
    (cache / "abc.incomplete").write_bytes(b"")
    assert "1 unfinished .incomplete file in" in found("q.safetensors")
    (tmp_path / "ok.safetensors").write_bytes(GOOD)
    (tmp_path / "ok.safetensors.incomplete").write_bytes(b"of an earlier try")
    assert SafetensorsFile.open(tmp_path / "ok.safetensors").tensors.keys() == {"x"}


@pytest.mark.parametrize("header", [b'{"x":[' + b"0," * 9_000_000 + b"0]}", b'{"' + b"a" * 30_000_000],
                         ids=["many values", "a long name"])
def test_memory_is_bounded(tmp_path, header):
    content = file_bytes(header)
    tracemalloc.start()
    assert findings_of(tmp_path, content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(content)


def peak_of(tmp_path, content: bytes) -> int:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        SafetensorsFile.scan(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


SLACK = 1 << 20   # of small headers: what the reader itself needs


@pytest.mark.parametrize("part", [b'{"":1}', b'{"":1 }' + b" " * 16, b"{}", b"[]", b"[0]", b"1.5", b"[[[[0]]]]", b'{"":{"":0}}'])
def test_memory_of_the_densest_headers(tmp_path, part):
    content = file_bytes(b'{"x":[' + part + (b"," + part) * (800_000 // len(part)) + b"]}")
    assert peak_of(tmp_path, content) < 32 * len(content) + SLACK


def test_a_long_header_is_refused_unread(tmp_path):
    path = tmp_path / "a.safetensors"
    with path.open("wb") as f:
        f.write((MAX_HEADER + 1).to_bytes(8, "little") + b"{")
        f.truncate(2 * MAX_HEADER)
    tracemalloc.start()
    (finding,) = SafetensorsFile.scan(path)[1]
    assert "header length 100,000,001" in finding.found and tracemalloc.get_traced_memory()[1] < SLACK
    tracemalloc.stop()


def official(content: bytes) -> bool:
    """Whether the safetensors package accepts a file."""
    try:
        safetensors.deserialize(content)
        return True
    except (safetensors.SafetensorError, ValueError):
        return False


# Older packages do not know the newest dtypes.
DTYPES = [dtype for dtype, bits in DTYPE_BITS.items() if official(file_bytes({"x": entry(dtype, (8,), (0, bits))}, bytes(bits)))]


def accepted(tmp_path, content: bytes) -> bool:
    findings = findings_of(tmp_path, content)
    for finding in findings:
        str(finding).encode()
    if b"-0" not in content and not any(dtype.encode() in content for dtype in DTYPE_BITS if dtype not in DTYPES):
        assert findings or official(content)  # we may be stricter, never laxer, but that -0 is a 0 to us
    return not findings


@PROPERTY
@given(st.binary(max_size=200))
def test_random_bytes(tmp_path, content):
    accepted(tmp_path, content)
    accepted(tmp_path, file_bytes(content))
    accepted(tmp_path, file_bytes(b"{" + content + b"}"))


_names = st.text(max_size=4) | st.sampled_from(["a", "b", "__metadata__"])
_sizes = st.integers(-1, 4) | st.sampled_from([2**31, 2**63, 2**64, True, 1.0, None, "2"])
_json = st.recursive(st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5),
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3), max_leaves=6)
_entries = st.fixed_dictionaries(
    {"dtype": st.sampled_from([*DTYPE_BITS, "F33", "f32"]) | _json, "shape": st.lists(_sizes, max_size=4) | _json,
     "data_offsets": st.lists(_sizes, min_size=2, max_size=2) | _json}, optional={"extra": _json})


@PROPERTY
@given(st.dictionaries(_names, _entries | _json, max_size=3), st.integers(0, 20))
def test_odd_headers(tmp_path, header, size):
    accepted(tmp_path, file_bytes(header, bytes(size)))


@settings(PROPERTY, max_examples=60)
@given(st.one_of(_json, _entries), st.integers(1, 3000), st.booleans())
def test_memory_follows_the_header(tmp_path, value, count, named):
    part = json.dumps(value)
    parts = [f'"{i}":{part}' if named else part for i in range(count)]
    content = file_bytes(('{' if named else '{"x":[').encode() + ",".join(parts).encode() + (b"}" if named else b"]}"))
    assert peak_of(tmp_path, content) < 32 * len(content) + SLACK


_tensors = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=5)


@PROPERTY
@given(_tensors, st.randoms(use_true_random=False), st.data())
def test_valid_files_and_their_mutations(tmp_path, tensors, random, data):
    header, at = {}, 0
    for i, (dtype, shape) in enumerate(tensors):
        bits = int(np.prod(shape, dtype=int)) * DTYPE_BITS[dtype]
        if bits % 8 == 0:
            header[f"t{i}"] = entry(dtype, shape, (at, at + bits // 8))
            at += bits // 8
    names = list(header)
    random.shuffle(names)
    content = file_bytes({name: header[name] for name in names}, random.randbytes(at))
    assert accepted(tmp_path, content) and official(content)
    where = data.draw(st.integers(0, len(content) - 1))
    accepted(tmp_path, content[:where] + bytes([data.draw(st.integers(0, 255))]) + content[where + 1:])
    accepted(tmp_path, content[:where] + content[where + 1:])
    accepted(tmp_path, content[:where])
