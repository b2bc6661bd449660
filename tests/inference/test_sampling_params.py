"""Settings of sampling: what is possible, and of which type."""

import math

import numpy as np
import pytest

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.inference.sampling_params import SamplingParams


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.nan},
        {"logit_bias": {50: 1.0}},
        {"logit_bias": {1: math.inf}},
        {"n": 0},
        {"logprobs": -1},
        {"stop_token_ids": (-1,)},
        {"stop": ("",)},
        {"stop": "end"},
    ],
)
def test_impossible_values_are_named(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        SamplingParams(**values).check(50)
    SamplingParams().check(50)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "1"},
        {"temperature": True},
        {"top_k": 1.5},
        {"seed": "x"},
        {"n": 1.5},
        {"logprobs": True},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": None},
        {"stop": (1,)},
        {"stop": None},
        {"stop_token_ids": 5},
    ],
    ids=repr,
)
def test_values_of_another_type_are_named(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        SamplingParams(**values).check(50)


def test_numbers_of_numpy_are_numbers():
    SamplingParams(
        top_k=np.int64(3), temperature=np.float32(0.5), logit_bias={np.int64(1): np.float64(2.0)}, seed=np.uint8(1)
    ).check(50)
