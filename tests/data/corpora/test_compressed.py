import hashlib
import random
import subprocess

import hypothesis
import pytest
from hypothesis import strategies as st

from megatron_dmtd.data.corpora.compressed import ByteStream, DamagedFileError
from tests.data.corpora.texts import COMPRESSED, PACKERS, write

CONTENT = random.Random(0).randbytes(400_000) + bytes(200_000)


def read(stream):
    """The content up to its end or the damage, and the damage."""
    chunks, damage = [], ""
    try:
        chunks += iter(stream)
    except DamagedFileError as error:
        damage = str(error)
    return b"".join(chunks), damage


@pytest.mark.parametrize("read_bytes", [100, 4096, 1 << 30])
@pytest.mark.parametrize("suffix", PACKERS)
def test_the_content_and_the_digest_on_disk_do_not_depend_on_how_much_is_read_at_once(tmp_path, suffix, read_bytes):
    path = write(tmp_path, CONTENT, suffix)
    stream = ByteStream(path, read_bytes=read_bytes)
    assert stream.bytes_read == 0
    assert read(stream) == (CONTENT, "")
    assert stream.bytes_read == path.stat().st_size
    assert stream.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_an_empty_content_is_no_damage(tmp_path, suffix):
    assert read(ByteStream(write(tmp_path, b"", suffix))) == (b"", "")


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_what_comes_before_the_damage_is_good(tmp_path, suffix):
    path = write(tmp_path, CONTENT, suffix)
    path.write_bytes(path.read_bytes()[:300_000])
    content, damage = read(stream := ByteStream(path))
    assert CONTENT.startswith(content) and len(content) > 100_000 and damage.startswith("truncated")
    assert stream.bytes_read == 300_000


def unpacked(path):
    """What the format's own tool makes of a file, and whether it accepts it; `gzip` warns with the status 2."""
    tool = {".gz": ["gzip"], ".bz2": ["bzip2"], ".xz": ["xz"], ".zst": ["zstd", "-q"]}[path.suffix]
    done = subprocess.run([*tool, "-dc", path], capture_output=True)
    return done.stdout, done.returncode == 0 or (path.suffix == ".gz" and done.returncode == 2)


def as_by_the_tool(path, *, read_bytes):
    """The content, where our reader and the format's own tool agree on it and on whether there is damage."""
    theirs, accepted = unpacked(path)
    content, damage = read(stream := ByteStream(path, read_bytes=read_bytes))
    assert (damage == "") == accepted, (damage, path.read_bytes())
    assert content == theirs or not accepted, path.read_bytes()
    assert stream.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    return content, damage, stream.remark


TAILS = [b"x", b"no stream", b"\n", bytes(1), bytes(3), bytes(4), bytes(8), bytes(6) + b"no stream", bytes(512)]


@pytest.mark.parametrize("read_bytes", [1, 1 << 18])
@pytest.mark.parametrize("suffix", COMPRESSED)
def test_what_follows_the_last_stream_is_taken_as_the_formats_own_tool_takes_it(tmp_path, suffix, read_bytes):
    path = write(tmp_path, CONTENT[:1000], suffix)
    whole, results = path.read_bytes(), {}
    for tail in TAILS:
        path.write_bytes(whole + tail)
        content, damage, remark = as_by_the_tool(path, read_bytes=read_bytes)
        assert content == CONTENT[:1000]
        results[tail] = damage.split(":")[0] or remark or "accepted"
    assert results[b"x"] == ("1 bytes after the end of the compressed stream left out" if suffix == ".bz2" else "truncated") or (
        suffix in (".xz", ".zst") and results[b"x"] in ("damaged", "truncated")
    )
    assert (results[b"no stream"] == "9 bytes after the end of the compressed stream left out") == (suffix in (".gz", ".bz2"))
    assert (results[bytes(8)] == "accepted") == (suffix != ".zst")
    assert (results[bytes(3)] == "accepted") == (suffix in (".gz", ".bz2"))


MAGIC = {".gz": b"\x1f\x8b\x08", ".bz2": b"BZh9", ".xz": b"\xfd7zXZ\0", ".zst": b"\x28\xb5\x2f\xfd"}


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_files_of_streams_padding_garbage_and_cut_ends_are_read_as_by_the_formats_own_tool(tmp_path, suffix):
    seen = set()

    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @hypothesis.given(
        contents=st.lists(st.binary(max_size=50), min_size=1, max_size=3),
        between=st.sampled_from([b"", b"", bytes(1), bytes(4), b"\n", b"garbage", bytes(2) + b"xy"]),
        begun=st.integers(0, 6),
        cut=st.integers(0, 30),
        read_bytes=st.sampled_from([1, 2, 5, 1 << 18]),
    )
    def check(contents, between, begun, cut, read_bytes):
        whole = between.join(PACKERS[suffix](content) for content in contents) + MAGIC[suffix][:begun]
        path = tmp_path / f"a{suffix}"
        path.write_bytes(whole[: len(whole) - cut] or whole)
        _, damage, remark = as_by_the_tool(path, read_bytes=read_bytes)
        seen.add((bool(damage), bool(remark)))

    check()
    assert {(False, False), (True, False)} <= seen


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_stream_that_has_only_begun_is_truncated(tmp_path, suffix):
    path = write(tmp_path, CONTENT[:1000], suffix)
    path.write_bytes(path.read_bytes() + MAGIC[suffix][:2])
    assert not unpacked(path)[1]
    assert read(ByteStream(path)) == (CONTENT[:1000], "truncated: the compressed stream has no end")


@pytest.mark.parametrize("read_bytes", [7, 1 << 18])
@pytest.mark.parametrize("suffix", COMPRESSED)
def test_streams_that_follow_each_other_are_one_content(tmp_path, suffix, read_bytes):
    pack = PACKERS[suffix]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(pack(CONTENT[:5000]) + pack(b"") + pack(CONTENT[5000:9000]))
    assert as_by_the_tool(path, read_bytes=read_bytes) == (CONTENT[:9000], "", "")


def test_windows_as_large_as_the_format_has_are_read(tmp_path):
    path = tmp_path / "a.zst"
    with path.open("wb") as stream:  # from a pipe: a known size would make the window small
        packer = subprocess.Popen(["zstd", "-q", "--long=31", "-c"], stdin=subprocess.PIPE, stdout=stream)
        packer.communicate(CONTENT)
    assert not unpacked(path)[1], "the tool asks for --long=31 here too"
    assert read(ByteStream(path)) == (CONTENT, "")


def test_frames_that_decoders_skip_are_skipped(tmp_path):
    frame = (0x184D2A5E).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    path = tmp_path / "a.zst"
    path.write_bytes(frame + PACKERS[".zst"](CONTENT) + frame)
    assert read(ByteStream(path)) == (CONTENT, "")
