import pytest

from megatron_dmtd.config import validate
from megatron_dmtd.errors import ConfigError
from tests.support.tiny import tiny_config


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"packing": "best-fit", "prefetch_batches": 0, "shuffle_seed": 0},
        {"train": ("a", "b"), "train_weights": (0.001, 0.999)},
        {"train": ("a", "b")},
    ],
)
def test_sound_settings_pass(settings):
    validate(tiny_config(data=settings))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"shuffle_seed": -1}, r"data\.shuffle_seed = -1"),
        ({"prefetch_batches": -1}, r"data\.prefetch_batches = -1"),
        ({"train": ("a", "b"), "train_weights": (1.0,)}, r"1 data\.train_weights for 2 corpora"),
        ({"train": ("a", "b"), "train_weights": (1.0, 0.0)}, r"data\.train_weights = \[1\.0, 0\.0\]"),
        ({"train": ("a",), "train_weights": (float("nan"),)}, r"data\.train_weights = \[nan\]"),
        ({"train": ("a",), "train_weights": (float("inf"),)}, r"data\.train_weights = \[inf\]"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, found):
    with pytest.raises(ConfigError, match=found):
        validate(tiny_config(data=settings))
