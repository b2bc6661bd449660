"""What a backend is given of Megatron's layout, and what comes back. Numbers: `test_model.py`."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dmtd.architecture import AttentionSpec, RotaryProfile, Stream
from megatron_dmtd.models.attention_core import StreamAttentionCore
from megatron_dmtd.models.streams import VisitStreams
from megatron_dmtd.platform import prepare_megatron
from tests.support.tiny import tiny_config

B, N, H, G, D = 2, 4, 4, 2, 8
PROFILE = RotaryProfile(theta=1e4)
BOTH = (Stream.REAL, Stream.SHADOW)


class Recorder:
    """A backend that gives each query stream back, and notes which keys it was shown."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...], int | None, bool]] = []

    def real(self, q, k, v, *, window):
        self.calls.append(("real", tuple(k.shape), window, False))
        return q + v.mean()

    def shadow(self, q, k, v, real_k, real_v, *, window):
        self.calls.append(("shadow", tuple(k.shape), window, real_k is not None))
        return q + v.mean()


def core(window: int | None = None) -> StreamAttentionCore:
    prepare_megatron()
    from megatron_dmtd.models.transformer_config import transformer_config

    attention = AttentionSpec(num_attention_heads=H, num_key_value_heads=G, head_dim=D, rotary=PROFILE, window=window)
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    return StreamAttentionCore(transformer_config(tiny_config(), on_cuda=False), attention=attention, pg_collection=groups)


def attended(streams: tuple[Stream, ...], outputs: tuple[Stream, ...], *, window: int | None = None):
    """The output, the queries, and the calls of a visit without rotation (all angles zero)."""
    recorder = Recorder()
    angles = {(PROFILE, D): torch.zeros(N, B, 1, D)}
    visit = VisitStreams(backend=recorder, angles=angles, streams=streams, outputs=outputs)  # type: ignore[arg-type]
    query = torch.arange(N * len(outputs) * B * H * D, dtype=torch.float32).reshape(N, len(outputs) * B, H, D)
    key = torch.zeros(N, len(streams) * B, G, D)
    found = core(window)(query, key, key, None, packed_seq_params=visit)
    return found, query, recorder.calls


@pytest.mark.parametrize(
    ("streams", "outputs", "calls"),
    [
        ((Stream.REAL,), (Stream.REAL,), [("real", (B, G, N, D), 3, False)]),
        ((Stream.SHADOW,), (Stream.SHADOW,), [("shadow", (B, G, N, D), 3, False)]),
        (BOTH, BOTH, [("real", (B, G, N, D), 3, False), ("shadow", (B, G, N, D), 3, True)]),
        (BOTH, (Stream.SHADOW,), [("shadow", (B, G, N, D), 3, True)]),
    ],
)
def test_each_stream_that_leaves_attends_to_its_own_keys_and_shadow_to_real_ones_where_there_are_some(streams, outputs, calls):
    found, query, made = attended(streams, outputs, window=3)
    assert made == calls
    assert torch.equal(found, query.reshape(N, len(outputs) * B, H * D)), "rows and heads come back where they were"


def test_without_a_window_backends_are_told_so():
    assert attended(BOTH, BOTH)[2][0][2] is None


def test_queries_and_keys_are_rotated_and_values_are_not():
    kept = {}

    class Keep(Recorder):
        def real(self, q, k, v, *, window):
            kept.update(q=q, k=k, v=v)
            return q

    angles = {(PROFILE, D): torch.full((N, B, 1, D), torch.pi)}
    visit = VisitStreams(backend=Keep(), angles=angles, streams=(Stream.REAL,), outputs=(Stream.REAL,))  # type: ignore[arg-type]
    query, key = torch.ones(N, B, H, D), torch.ones(N, B, G, D)
    core()(query, key, key, None, packed_seq_params=visit)
    torch.testing.assert_close(kept["q"], -torch.ones(B, H, N, D))
    torch.testing.assert_close(kept["k"], -torch.ones(B, G, N, D))
    assert torch.equal(kept["v"], torch.ones(B, G, N, D))
