"""`check --hash`: contents against what a download left, or an earlier run recorded; taken up again where it was interrupted."""
import errno
import hashlib
import json
import os
import signal
import time

import pytest
from command import k3, k3_json, start

from damage import NUM_SHARDS, shard
from k3cuda.errors import OutOfMemory, UsageError
from k3cuda.runtime import atomic_file, block_reader, hash_check
from k3cuda.runtime.hash_check import SUMS, Manifest, check_hashes, expected_hashes

FILES = ["config.json", "generation_config.json", "model.safetensors.index.json", "tiktoken.model", "tokenizer_config.json",
         *(shard(n) for n in range(1, NUM_SHARDS - 1))]   # what a load reads: no pictures


def sha256(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hashed(folder, tmp_path, *more, code=0):
    return k3_json("check", folder, "--hash", "--hash-manifest", tmp_path / "record.json", "--json", *more, code=code)


def spoil(path) -> None:
    """One bit of the last byte; size and time stay."""
    info = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def counts(found):
    return tuple(found["facts"][f"{name}_files"] for name in ("hashed", "resumed", "verified", "recorded"))


def test_sums_beside_the_files(folder, tmp_path):
    (folder / SUMS).write_text("".join(f"{sha256(folder / name)}  {name}\n" for name in FILES))
    assert counts(hashed(folder, tmp_path)) == (len(FILES), 0, len(FILES), 0)
    spoil(folder / shard(3))
    found = hashed(folder, tmp_path, code=3)
    (finding,) = found["findings"]
    assert finding["file"] == str(folder / shard(3)) and finding["code"] == 3
    assert finding["found"] == f"SHA-256 {sha256(folder / shard(3))}" and finding["wanted"].endswith(f", by {SUMS}")


def test_notes_and_links_of_the_hub_client(folder):
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    (notes / f"{shard(1)}.metadata").write_text(f"5e3c\n{sha256(folder / shard(1))}\n1767225600.0\n")
    (notes / "config.json.metadata").write_text(f"5e3c\n{'ab' * 20}\n1767225600.0\n")   # a git hash, of no use here
    blob = folder.parent / "blobs" / sha256(folder / shard(2))
    blob.parent.mkdir()
    (folder / shard(2)).rename(blob)
    (folder / shard(2)).symlink_to(blob)
    found = expected_hashes(folder, FILES)
    assert found.keys() == {shard(1), shard(2)}
    assert found[shard(1)].sha256 == sha256(folder / shard(1)) and found[shard(1)].source.endswith(".metadata")
    assert found[shard(2)].sha256 == blob.name


def test_a_first_run_is_the_record_of_the_next(folder, tmp_path):
    first = hashed(folder, tmp_path)
    assert counts(first) == (len(FILES), 0, 0, len(FILES)) and "the next --hash compares" in first["notes"][-1]
    assert counts(hashed(folder, tmp_path)) == (len(FILES), 0, len(FILES), 0)
    spoil(folder / shard(1))
    (finding,) = hashed(folder, tmp_path, code=3)["findings"]
    assert "record.json of an earlier run; remove it where the file was replaced on purpose" in finding["wanted"]
    spoil(folder / shard(1))
    os.utime(folder / shard(1))   # downloaded again: only it is read, the rest was hashed by the run that found it
    assert counts(hashed(folder, tmp_path)) == (1, len(FILES) - 1, len(FILES), 0)
    assert counts(hashed(folder, tmp_path)) == (len(FILES), 0, len(FILES), 0)


def test_a_run_that_failed_is_taken_up_again(folder, tmp_path, monkeypatch):
    preadv, bad = os.preadv, (folder / shard(4)).stat().st_ino

    def failing(fd, buffers, offset):
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    def run():
        return check_hashes(folder, FILES, Manifest(tmp_path / "r.json", folder), {})

    monkeypatch.setattr(os, "preadv", failing)
    findings, facts = run()
    assert [f.file for f in findings] == [str(folder / shard(4))] and "error on reading at byte 0" in findings[0].found
    assert not json.loads((tmp_path / "r.json").read_text())["complete"]
    monkeypatch.setattr(os, "preadv", preadv)
    os.utime(folder / shard(2))   # changed meanwhile: read again
    findings, facts = run()
    assert not findings and (facts["hashed_files"], facts["resumed_files"]) == (2, len(FILES) - 2)
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["complete"] and {name: entry["sha256"] for name, entry in saved["files"].items()} == {name: sha256(folder / name) for name in FILES}


def test_an_interrupt_keeps_what_was_finished(folder, tmp_path):
    with open(folder / shard(5), "r+b") as f:   # many minutes of holes behind the small files
        f.truncate(1 << 42)
    process = start("check", folder, "--hash", "--hash-manifest", tmp_path / "r.json")
    deadline = time.monotonic() + 60
    while not (tmp_path / "r.json").exists() or len(json.loads((tmp_path / "r.json").read_text())["files"]) < len(FILES) - 1:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130 and b"Traceback" not in process.communicate()[1]
    saved = json.loads((tmp_path / "r.json").read_text())
    assert not saved["complete"] and saved["files"].keys() == set(FILES) - {shard(5)}


def test_records_that_are_none(folder, tmp_path):
    record = tmp_path / "r.json"
    for content in ("", "[]", "{", '{"version": 1}', json.dumps({"version": 1, "model": "another", "files": {}})):
        record.write_text(content)
        with pytest.raises(UsageError, match="r.json: found"):
            Manifest(record, folder)
    k3("check", "tiny-random", "--hash", code=2)
    assert b"--hash-manifest without --hash" in k3("check", folder, "--hash-manifest", record, code=2).stderr
    assert (tmp_path / "cache").exists() is False
    k3("check", folder, "--hash", env={"K3CUDA_CACHE_DIR": str(tmp_path / "cache")})
    (kept,) = (tmp_path / "cache" / "hashes").iterdir()
    assert json.loads(kept.read_text())["complete"]


def test_a_full_disk_leaves_the_record_as_it_was(tmp_path, monkeypatch):
    record = tmp_path / "r.json"
    record.write_text("before")

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_file.os, "fsync", full)
    with pytest.raises(OutOfMemory, match="r.json: No space left on device: nothing half-written"), atomic_file.atomic_file(record) as f:
        f.write(b"after")
    assert record.read_text() == "before" and os.listdir(tmp_path) == ["r.json"]
    with pytest.raises(UsageError, match="cannot be written"), atomic_file.atomic_file(tmp_path / "no" / "r.json"):
        pass


def test_large_files_are_read_in_chunks(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(hash_check, "CHUNK", 4096)
    for room in (1, 1 << 40):   # past the page cache, and through it
        monkeypatch.setattr(block_reader, "memory_bytes", lambda: room)
        manifest = Manifest(tmp_path / f"{room}.json", folder)
        findings, _ = check_hashes(folder, FILES, manifest, {})
        assert not findings and {name: manifest.done[name]["sha256"] for name in FILES} == {name: sha256(folder / name) for name in FILES}
