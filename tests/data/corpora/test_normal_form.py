import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from megatron_dmtd.data.corpora.normal_form import SAFE, NormalForm

NFC = normalizers.NFC()
EVERY = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
#: what composes or reorders, next to what does not
AWKWARD = st.text(
    st.sampled_from("ae>\u0301\u0323\u0338\u07eb\u07fd\u1100\u1161\u11a8\uac00\ufb01\u212bé中\n \u3099か\u09c7\u09be")
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.text() | AWKWARD)
def test_it_holds_exactly_where_normalising_changes_nothing(text):
    normalised = NFC.normalize_str(text)
    assert NormalForm().of(text) == normalised
    assert NormalForm().holds(text) == (normalised == text)


@pytest.mark.parametrize(
    ("text", "holds"),
    [("", True), ("é", True), ("e\u0301", False), (">\u0338", False), ("\u07eb\u07fd", True), ("가\u11a8", False)],
)
def test_examples(text, holds):
    assert NormalForm().holds(text) == holds


def test_safe_characters_stand_for_themselves_and_never_join_what_is_before_them():
    safe = [one for one in EVERY if re.fullmatch(f"[{SAFE}]", one)]
    assert len(safe) > 30_000
    assert all(unicodedata.combining(one) == 0 and unicodedata.is_normalized("NFC", one) for one in safe)
    assert NFC.normalize_str("".join(safe)) == "".join(safe)
    seconds = {chr(int(unicodedata.decomposition(one).split()[-1], 16)) for one in EVERY if " " in _canonical(one)}
    seconds |= {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}  # of Hangul, which is computed
    assert len(seconds) > 60
    assert not seconds & set(safe)


def _canonical(one):
    decomposition = unicodedata.decomposition(one)
    return "" if decomposition.startswith("<") else decomposition
