"""Our reading of words against bash's own."""

import subprocess

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_dmtd.launch.words import WordError, directive, read_assignment, split_directive, split_words

#: characters that mean something somewhere, and a few that do not
_TEXT = st.text(alphabet="ab#\"'\\ $`;&|<>(){}[]*?~!:=,@%^+-\t\u00a0\u0085\u2028é", max_size=12)
_LISTS = st.lists(_TEXT, min_size=60, max_size=60)
_SLOW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def bash(script: str, *, home: str = "/root") -> list[str]:
    """What a script prints, cut at NUL bytes."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": home, "LC_ALL": "C.UTF-8", "V": "a  b*"}
    result = subprocess.run(["bash", "-uc", script], capture_output=True, env=environment, timeout=30, cwd="/")
    assert result.returncode == 0, (script, result.stderr)
    return result.stdout.decode().split("\0")[:-1]


def read(function, text):
    try:
        return function(text)
    except WordError:
        return None


@given(_LISTS)
@example(["nvcr.io#nvidia/pytorch:25.10-py3", "#x", "a #b", "", "a\\ b", "[a]", "{a,b}", "!", "*"])
@_SLOW
def test_a_value_is_bashs_or_refused(values):
    accepted = {text: read(lambda text: read_assignment(f"X={text}"), text) for text in values}
    accepted = {text: found for text, found in accepted.items() if found is not None}
    script = "".join(f"X={text}\nprintf '%s\\0' \"$X\"\n" for text in accepted)
    assert bash(script) == [value for _, value in accepted.values()]


@given(_LISTS)
@example(["--a=b#c d #e", '"$V" x', "'$V'", "a\\#b '' \"\"", '"${V}x"'])
@_SLOW
def test_words_of_a_list_are_bashs_or_refused(texts):
    accepted = {text: read(lambda text: split_words(text, variables={"V": "a  b*"}), text) for text in texts}
    accepted = {text: words for text, words in accepted.items() if words is not None}
    script = "".join(f'A=(\n{text}\n)\nprintf \'%s\\0\' "${{#A[@]}}" ${{A[@]+"${{A[@]}}"}}\n' for text in accepted)
    assert bash(script) == [part for words in accepted.values() for part in (str(len(words)), *words)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("X=$(id)", "a variable or command outside double quotes: X=$(id)"),
        ('X="$HOME"', 'a variable or command: X="$HOME"'),
        ('X="`id`"', "a command"),
        ("X=a b", "more than one word"),
        ("X = a", "no NAME=VALUE"),
        ("X='a", "a quote ' that does not end on its line"),
        ("X=a;b", "; outside quotes"),
        ("X=a:~/b", "~ outside quotes"),
        ("X=a\\", "a backslash at the end"),
        ("X=a\x07", "control character"),
    ],
)
def test_what_needs_a_shell_is_refused_by_its_line(text, found):
    with pytest.raises(WordError) as refusal:
        read_assignment(text)
    assert found in str(refusal.value)


def test_plain_values_are_not_refused():
    """Else a reader that refuses all would pass above."""
    assert read_assignment("X=nvcr.io#nvidia/pytorch:25.10-py3") == ("X", "nvcr.io#nvidia/pytorch:25.10-py3")
    assert read_assignment("  X='a b'\"c\" # remark") == ("X", "a bc")
    assert read_assignment("   # remark") is None
    assert split_words("a 'b c'  # d\ne\"$V\"", variables={"V": "1 2"}) == ["a", "b c", "e1 2"]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=20))
def test_a_directive_is_read_as_it_was_written(value):
    line = directive("comment", value)
    assert split_directive(line.removeprefix("#SBATCH")) == ([f"--comment={value}"] if value else ["--comment"])


def test_directives_are_read_as_sbatch_reads_them():
    """The values that sbatch 22.05 gave a job for this line."""
    line = ' --comment="a b#c \\"q\\" \\\\ é %x $HOME" --nodes=2 # remark'
    assert split_directive(line) == ['--comment=a b#c "q" \\ é %x $HOME', "--nodes=2"]
    assert split_directive(" --job-name=x#y") == ["--job-name=x"]
    with pytest.raises(WordError, match="does not end"):
        split_directive(' --comment="a')
    with pytest.raises(WordError, match="control character"):
        directive("comment", "a\nb")
