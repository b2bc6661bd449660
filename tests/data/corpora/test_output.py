"""The unfinished files of a run: what an interruption leaves, and that nothing half-made has its final name."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dmtd.data.batches.token_file import TokenFile
from megatron_dmtd.data.corpora.documents import BadDocument
from megatron_dmtd.data.corpora.encoding import SplitTokens
from megatron_dmtd.data.corpora.output import MAX_SKIPPED_NAMES, PartialOutput, RunState, final_paths, partial_folder
from megatron_dmtd.errors import DataError

HEADER = {"input": ["a.jsonl 10"], "mask id": 2}


def tokens(*documents, with_loss=False):
    ids = np.array([token for document in documents for token in document], dtype=np.uint16)
    return SplitTokens(
        tokens_N=ids,
        lengths_U=np.array([len(document) for document in documents], dtype=np.int32),
        loss_N=(ids % 2).astype(np.uint8) if with_loss else None,
        max_token_id=int(ids.max(initial=0)),
    )


@pytest.fixture
def prefix(tmp_path):
    return str(tmp_path / "out" / "c")


def opened(prefix, *, splits=("all",), header=HEADER, with_loss=False, overwrite=False, save_seconds=0.0):
    outputs = {split: prefix if split == "all" else f"{prefix}-{split}" for split in splits}
    return PartialOutput(
        prefix,
        outputs,
        header=header,
        dtype=np.uint16,
        with_loss=with_loss,
        overwrite=overwrite,
        save_seconds=save_seconds,
    )


def names(prefix):
    return sorted(path.name for path in Path(prefix).parent.iterdir())


def test_splits_get_their_names_when_all_is_written_and_the_folder_goes(prefix):
    with opened(prefix, splits=("train", "heldout"), with_loss=True) as output:
        output.append({"train": tokens([1, 2, 3], [5], with_loss=True), "heldout": tokens([4, 4], with_loss=True)})
        output.append({"train": tokens([7, 8], with_loss=True), "heldout": tokens(with_loss=True)})
        assert names(prefix) == ["c.partial"]
        output.finish({"train": "{}\n", "heldout": "{}\n"})
        assert names(prefix) == ["c.partial"]
        digest = output.bin_sha256("train")
        output.publish()
    train, heldout = TokenFile(prefix + "-train"), TokenFile(prefix + "-heldout")
    assert [train.read(nth, 0, count).tolist() for nth, count in enumerate((3, 1, 2))] == [[1, 2, 3], [5], [7, 8]]
    assert heldout.read(0, 0, 2).tolist() == [4, 4]
    assert TokenFile(prefix + "-train.loss").tokens(0, 3).tolist() == [1, 0, 1, 1, 1, 0]
    assert digest == hashlib.sha256(Path(prefix + "-train.bin").read_bytes()).hexdigest()
    endings = (".bin", ".idx", ".json", ".loss.bin", ".loss.idx")
    assert names(prefix) == sorted(f"c-{split}{ending}" for split in ("train", "heldout") for ending in endings)
    assert {path.name for path in final_paths({"train": prefix + "-train"})} == {f"c-train{ending}" for ending in endings}


def test_an_interrupted_run_goes_on_behind_what_was_saved_and_forgets_the_rest(prefix):
    with opened(prefix) as output:
        output.append({"all": tokens([1, 2])})
        output.state.input, output.state.block = 0, 1
        output.save()
        output.append({"all": tokens([9, 9, 9])})  # on disk, and in no saved state
    assert (partial_folder(prefix) / "all.bin").stat().st_size == 10
    with opened(prefix) as output:
        assert output.resumed and (output.state.block, output.state.splits["all"].num_tokens) == (1, 2)
        output.append({"all": tokens([3])})
        output.finish({"all": "{}\n"})
        assert output.bin_sha256("all") == hashlib.sha256(np.array([1, 2, 3], np.uint16).tobytes()).hexdigest()
        output.publish()
    file = TokenFile(prefix)
    assert file.document_lengths_U.tolist() == [2, 1] and file.tokens(0, 2).tolist() == [1, 2, 3]


def test_states_are_saved_only_as_often_as_asked_for(prefix):
    with opened(prefix, save_seconds=1e9) as output:
        output.append({"all": tokens([1])})
        output.save()
        assert not (output.folder / "state.json").exists()
        output.save(now=True)
        assert json.loads((output.folder / "state.json").read_text())["splits"]["all"]["num_tokens"] == 1


def test_a_run_that_saved_nothing_leaves_nothing(prefix):
    with opened(prefix) as output:
        assert output.folder.is_dir() and not output.resumed
    assert names(prefix) == []


def test_another_run_is_refused_by_what_differs_and_discarded_on_demand(prefix):
    with opened(prefix) as output:
        output.append({"all": tokens([1])})
        output.save()
    with pytest.raises(DataError, match="an unfinished run with another mask id"):
        opened(prefix, header={**HEADER, "mask id": 3})
    with opened(prefix, header={**HEADER, "mask id": 3}, overwrite=True) as output:
        assert not output.resumed and output.state.splits["all"].num_tokens == 0


def test_two_processes_do_not_write_one_output(prefix):
    with opened(prefix), pytest.raises(DataError, match=r"c\.partial, which another process is using"):
        opened(prefix)
    opened(prefix).close()  # the first one has given it up


def test_an_interruption_between_names_is_told_from_other_unfinished_runs(prefix):
    with opened(prefix) as output:
        output.append({"all": tokens([1])})
        output.save()
        assert not PartialOutput.is_publishing(prefix, HEADER)
        output.finish({"all": "{}\n"})
    assert PartialOutput.is_publishing(prefix, HEADER) and not PartialOutput.is_publishing(prefix, {"input": []})
    with opened(prefix) as output:
        assert output.state.finished
        output.publish()
    assert names(prefix) == ["c.bin", "c.idx", "c.json"] and not PartialOutput.is_publishing(prefix, HEADER)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"header": {}, "splits": {"all": {"num_words": 1}}}', '{"splits": []}'])
def test_a_damaged_state_is_refused_by_name(prefix, text):
    partial_folder(prefix).mkdir(parents=True)
    (partial_folder(prefix) / "state.json").write_text(text)
    with pytest.raises(DataError, match=r"c\.partial/state\.json"):
        opened(prefix)
    (partial_folder(prefix) / "state.json").unlink()
    opened(prefix).close()  # the lock was given up


@pytest.mark.parametrize(("name", "found"), [("", "the output ''"), ("folder/", "the output 'folder/'")])
def test_an_output_without_a_name_is_refused(tmp_path, monkeypatch, name, found):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=found):
        opened(name)
    assert list(tmp_path.iterdir()) == []


def test_all_skipped_documents_are_counted_and_the_first_are_named():
    state = RunState(header={})
    bad = [
        BadDocument(name=f"a:{nth}", kind="empty" if nth % 2 else "not JSON", found="x", required="y")
        for nth in range(MAX_SKIPPED_NAMES + 7)
    ]
    state.skip(bad[:3])
    state.skip(bad[3:])
    assert state.skipped_counts == {"not JSON": 504, "empty": 503}
    assert state.skipped == [f"a:{nth}" for nth in range(MAX_SKIPPED_NAMES)]
