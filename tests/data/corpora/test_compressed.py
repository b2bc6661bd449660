import hashlib
import random
import subprocess

import pytest

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
    """What the format's own tool makes of a file, and its exit status."""
    tool = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}[path.suffix]
    done = subprocess.run([tool, "-dc"], stdin=path.open("rb"), capture_output=True)
    return done.stdout, done.returncode


@pytest.mark.parametrize("read_bytes", [1, 3, 1 << 18])
@pytest.mark.parametrize("tail", [b"x", b"no stream, and no zeros", bytes(8), bytes(8) + b"no stream"])
@pytest.mark.parametrize("suffix", COMPRESSED)
def test_what_follows_the_last_stream_is_taken_as_the_formats_own_tool_takes_it(tmp_path, suffix, tail, read_bytes):
    path = write(tmp_path, CONTENT[:1000], suffix)
    path.write_bytes(path.read_bytes() + tail)
    theirs, status = unpacked(path)
    content, damage = read(stream := ByteStream(path, read_bytes=read_bytes))
    assert content == theirs == CONTENT[:1000]
    garbage = tail.strip(b"\0")
    if suffix in (".gz", ".bz2") and garbage:
        assert (status in (0, 2) or garbage == b"x") and damage == "", "accepted with a warning; gzip wants two bytes to judge"
        assert stream.remark == f"{len(garbage)} bytes after the end of the compressed stream left out"
    else:
        assert (damage.startswith("damaged") or damage.startswith("truncated")) == bool(garbage)
        assert status == 0 or garbage or suffix == ".zst", "zeros are padding to all tools but zstd's, and to us"
        assert stream.remark == ""
    assert stream.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_stream_that_has_only_begun_is_truncated(tmp_path):
    path = write(tmp_path, CONTENT[:1000], ".gz")
    path.write_bytes(path.read_bytes() + b"\x1f")
    assert read(ByteStream(path)) == (CONTENT[:1000], "truncated: the last compressed stream has no more than a beginning")


@pytest.mark.parametrize("read_bytes", [7, 1 << 18])
@pytest.mark.parametrize("suffix", COMPRESSED)
def test_streams_that_follow_each_other_are_one_content_with_zeros_between_them_too(tmp_path, suffix, read_bytes):
    pack = PACKERS[suffix]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(pack(CONTENT[:5000]) + pack(b"") + pack(CONTENT[5000:9000]))
    assert unpacked(path) == (CONTENT[:9000], 0)
    assert read(ByteStream(path, read_bytes=read_bytes)) == (CONTENT[:9000], "")
    path.write_bytes(pack(CONTENT[:5000]) + bytes(4) + pack(CONTENT[5000:9000]))
    assert read(ByteStream(path, read_bytes=read_bytes)) == (CONTENT[:9000], "")


def test_windows_as_large_as_the_format_has_are_read(tmp_path):
    path = tmp_path / "a.zst"
    with path.open("wb") as stream:  # from a pipe: a known size would make the window small
        packer = subprocess.Popen(["zstd", "-q", "--long=31", "-c"], stdin=subprocess.PIPE, stdout=stream)
        packer.communicate(CONTENT)
    assert unpacked(path)[1] != 0, "the tool asks for --long=31 here too"
    assert read(ByteStream(path)) == (CONTENT, "")


def test_frames_that_decoders_skip_are_skipped(tmp_path):
    frame = (0x184D2A5E).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    path = tmp_path / "a.zst"
    path.write_bytes(frame + PACKERS[".zst"](CONTENT) + frame)
    assert read(ByteStream(path)) == (CONTENT, "")
