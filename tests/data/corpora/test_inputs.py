from megatron_dmtd.data.corpora.documents import BadDocument, Document
from megatron_dmtd.data.corpora.inputs import EntriesBlock, file_identity
from megatron_dmtd.data.corpora.sources import open_inputs
from tests.data.corpora.texts import CONTENT, write


def test_an_input_that_changed_has_another_identity(tmp_path):
    path = write(tmp_path, CONTENT)
    before = open_inputs([str(path)])[0].identity()
    assert open_inputs([str(path)])[0].identity() == before
    path.write_bytes(CONTENT + b"\n")
    assert open_inputs([str(path)])[0].identity() != before


def test_a_files_identity_is_its_path_size_and_time_of_change(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"xyz")
    status = (tmp_path / "a").stat()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("a")
    path = type(tmp_path)("link")
    assert file_identity(path) == f"{tmp_path.resolve() / 'a'} 3 {status.st_mtime_ns}\n"


def test_a_block_of_documents_at_hand_yields_them_in_order():
    entries = (Document(name="a", text="x"), BadDocument(name="b", kind="empty", found="b", required="text"))
    block = EntriesBlock(documents=entries)
    assert tuple(block.entries()) == entries and block.num_bytes == 0
