import pytest


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "folder"
    (root / "sub").mkdir(parents=True)
    (root / "b.txt").write_bytes("zwei\r\nLinien é".encode())
    (root / "sub" / "a.txt").write_text("one")
    (root / "latin.txt").write_bytes(b"first\n\xe9")
    (root / "other.md").write_text("# not asked for")
    return root
