"""Reasons, from logs as torchrun and Python write them."""

import signal

import pytest

from megatron_dmtd.quickstart.failures import Reason, output_of_last_command, reason

REFUSAL = "DataError\nfound: no file a.bin,\n  nor a.idx\nrequired: both\nremedy: make them\n"
WARNING = (
    "W1201 04:50:56.175000 29151 torch/distributed/elastic/multiprocessing/api.py:1028] "
    "Sending process 29289 closing signal SIGTERM\n"
)
REPORT = """E1201 04:50:56.295000 29151 torch/distributed/elastic/api.py:1002] failed (exitcode: {status}) local_rank: 1 (pid: 2)
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
tools/train.py FAILED
  exitcode  : {status} (pid: 29287)
"""
EXCEPTION = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n\n  File "b.py"\nValueError: the reason\n'


def log(*parts: str) -> str:
    return (
        "$ an earlier command\nDataError\nfound: old\nrequired: old\nremedy: old\n$ python tools/train.py --x '[$ y]'\n"
        + "".join(parts)
    )


def test_a_refusal_is_found_in_the_words_of_whoever_refused_and_torchrun_is_not_quoted():
    expected = Reason(found="no file a.bin,\n  nor a.idx", required="both", remedy="make them")
    text = log("step 1/3  loss 2\n", REFUSAL, WARNING, REFUSAL, REPORT.format(status=2))
    assert reason(text, status=1) == expected
    assert reason(log(REFUSAL), status=2) == expected, "a command that torchrun did not start"


def test_an_exception_is_quoted_with_the_end_of_its_traceback_only():
    found = reason(
        log("step 1/3\n", EXCEPTION, WARNING, "another rank: connection closed\n", REPORT.format(status=1)), status=1
    ).found
    assert found.startswith("ValueError: the reason\n") and '  File "b.py"' in found
    assert "ChildFailedError" not in found and "connection closed" not in found and "torch/distributed" not in found


@pytest.mark.parametrize(
    ("status", "words"),
    [(-9, "rank 1 was ended by SIGKILL: the system"), (-11, "rank 1 was ended by SIGSEGV"), (-64, "rank 1 was")],
)
def test_a_rank_that_was_killed_is_the_reason_and_not_the_complaints_of_the_others(status, words):
    assert reason(log(EXCEPTION, REPORT.format(status=status)), status=1).found.startswith(words)


def test_without_any_of_these_the_last_lines_are_the_reason():
    assert reason(log(*(f"line {n}\n" for n in range(40))), status=3).found.splitlines() == [f"line {n}" for n in range(28, 40)]
    assert reason(log(), status=3).found == "no output"
    assert reason(log("working\n"), status=-signal.SIGTERM).found == "it was ended by SIGTERM"


def test_only_what_the_last_command_wrote_counts_and_redrawn_lines_as_they_stood_last():
    assert output_of_last_command(log(" 10%\r 20%\nend\n")) == " 20%\nend\n"
