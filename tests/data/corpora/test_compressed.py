import hashlib
import random

import pytest

from megatron_dmtd.data.corpora.compressed import ByteStream, DamagedFileError
from tests.data.corpora.texts import PACKERS, write

CONTENT = random.Random(0).randbytes(400_000) + bytes(200_000)
COMPRESSED = sorted(PACKERS.keys() - {""})


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


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_what_follows_a_whole_stream_and_is_none_is_damage(tmp_path, suffix):
    path = write(tmp_path, CONTENT, suffix)
    path.write_bytes(path.read_bytes() + b"not a stream, and no zeros")
    content, damage = read(ByteStream(path))
    assert content == CONTENT and damage.startswith("damaged")
