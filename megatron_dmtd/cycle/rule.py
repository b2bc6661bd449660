"""The rule of Parallel DMTD: cycles, shadow ids, and visibility.

This is the only statement of the rule; everything else in the project imports it. All functions work element by element on
Python numbers, NumPy arrays and torch tensors (and inside FlexAttention's tracer). The file imports nothing at all, since it
travels with every exported model as `dmtd_cycles.py`.

Positions count from 0 in each document. Source: docs/method.md, sections 1 to 5.
"""

VANILLA = "vanilla"

#: variant name -> (history, block_attention); docs/method.md, "The four models"
VARIANTS = {
    "causal-norefresh": ("shadow", "causal"),
    "causal-refresh": ("real", "causal"),
    "bidirectional-norefresh": ("shadow", "bidirectional"),
    "bidirectional-refresh": ("real", "bidirectional"),
}


def cycle_id(position, cycle_length):
    """The cycle that holds `position`."""
    return position // cycle_length


def phase(position, cycle_length):
    """The index of `position` within its cycle, from 0 (the head) to `cycle_length - 1`."""
    return position % cycle_length


def is_cycle_head(position, cycle_length):
    """Whether `position` is the first of its cycle: the only one whose token is part of the shadow input."""
    return phase(position, cycle_length) == 0


def complete_length(length, cycle_length):
    """`length` rounded up to whole cycles."""
    return cycle_id(length + cycle_length - 1, cycle_length) * cycle_length


def cycle_start(position, cycle_length):
    """The head of the cycle that holds `position`."""
    return cycle_id(position, cycle_length) * cycle_length


def parallel_entries(num_tokens, *, cycle_length, history):
    """Entries that a parallel layer's cache holds once `num_tokens` tokens have been taken (docs/method.md, section 9).

    With `history` "real": real K and V of the cycles strictly before that of the last token. With "shadow": shadow K and V of
    every cycle, the current one included. A sequential layer's cache holds `num_tokens` entries.
    """
    if history == "shadow":
        return complete_length(num_tokens, cycle_length)
    return (num_tokens > 0) * cycle_start(num_tokens - 1, cycle_length)


def shadow_ids(token_id, position, *, cycle_length, mask_token_id):
    """The shadow stream's ids: the token at cycle heads, `mask_token_id` elsewhere (docs/method.md, section 1.1)."""
    head = is_cycle_head(position, cycle_length)
    return head * token_id + (1 - head * 1) * mask_token_id


def visible(
    *,
    query_is_real,
    query_document,
    query_position,
    key_is_real,
    key_document,
    key_position,
    cycle_length,
    history,
    block_attention,
    window=None,
):
    """Whether a query slot of the parallel layers may read a key slot (docs/method.md, sections 1.4 and 2 to 5).

    A slot is (stream, document, position). `history` and `block_attention` are plain strings, the rest are numbers, booleans
    or broadcastable arrays of these; the result is a boolean or an array of booleans.

    - A real query reads real keys at or before its position: the ordinary causal rule.
    - With `history` "real" a shadow query reads the real keys of strictly earlier cycles and the shadow keys of its own cycle,
      and never a shadow key of another cycle.
    - With `history` "shadow" there are no real keys; a shadow query reads shadow keys at or before its position.
    - With "bidirectional" blocks a shadow query reads all of its own cycle.
    - Nothing reads across documents.
    - A `window` of w keys hides what lies w or more positions before the query, in every stream: a sliding window.

    Sequential layers and vanilla models have real slots only.
    """
    same_document = query_document == key_document
    before = key_position <= query_position
    query_cycle = cycle_id(query_position, cycle_length)
    key_cycle = cycle_id(key_position, cycle_length)
    same_cycle = query_cycle == key_cycle
    both_real = query_is_real & key_is_real
    shadow_query = query_is_real == False  # noqa: E712 - `not` and `~` differ between bool and arrays
    shadow_key = key_is_real == False  # noqa: E712
    both_shadow = shadow_query & shadow_key

    own_block = both_shadow & same_cycle
    if block_attention == "causal":
        own_block = own_block & before
    if history == "real":
        earlier = shadow_query & key_is_real & (key_cycle < query_cycle)
    else:
        earlier = both_shadow & (key_cycle < query_cycle)
    seen = same_document & ((both_real & before) | own_block | earlier)
    if window is None:
        return seen
    return seen & (query_position - key_position < window)
