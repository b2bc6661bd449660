import json

import pytest
from transformers import Qwen3Config

from megatron_dmtd.errors import ModelError
from megatron_dmtd.families import read_fields, write_fields
from megatron_dmtd.families.windows import windowed_layers

SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 32}


@pytest.mark.parametrize(
    "windows",
    [
        {},
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "max_window_layers": 1},
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
)
def test_windows_are_those_that_transformers_gives_each_layer(windows):
    config = Qwen3Config(**SIZES, **windows)
    expected = [
        config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        for layer in range(config.num_hidden_layers)
    ]
    for fields in (SIZES | windows | {"model_type": "qwen3"}, json.loads(json.dumps(config.to_dict()))):
        description = read_fields(fields)
        assert [layer.attention.window for layer in description.decoder.layers] == expected
        written = json.loads(json.dumps(write_fields(description)))
        assert read_fields(written) == description
        theirs = Qwen3Config(**{key: value for key, value in written.items() if key not in ("model_type", "architectures")})
        windowed = [layer for layer, kind in enumerate(theirs.layer_types) if kind == "sliding_attention"]
        assert tuple(windowed) == windowed_layers(description.model)


@pytest.mark.parametrize(
    ("windows", "named"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention in layer_types without use_sliding_window"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types for 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types with chunked_attention"),
        ({"use_sliding_window": True, "sliding_window": "wide"}, "sliding_window 'wide'"),
    ],
)
def test_windows_that_contradict_are_refused(windows, named):
    with pytest.raises(ModelError) as caught:
        read_fields(SIZES | {"model_type": "qwen3"} | windows)
    assert named in caught.value.found
