import argparse

import pytest

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.inference.loop_options import add_loop_options, loop_arguments


def arguments(*given: str) -> dict:
    parser = argparse.ArgumentParser()
    add_loop_options(parser)
    return loop_arguments(parser.parse_args(given))


def test_overrides_are_fields_of_the_models_configuration():
    text = '{"n_recurrent_loops": 2, "recurrent_kv_cache_mode": "last_loop"}'
    assert arguments("--hf-overrides", text) == {"num_loops": 2, "kv_mode": "last_loop", "prefill_chunk": None}
    assert arguments("--hf-overrides", '{"n_recurrent_loops": null}', "--num-loops", "3", "--prefill-chunk", "8") == {
        "num_loops": 3,
        "kv_mode": None,
        "prefill_chunk": 8,
    }
    assert arguments() == dict.fromkeys(("num_loops", "kv_mode", "prefill_chunk"))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--hf-overrides", "{n_recurrent_loops: 2}"), "a JSON object"),
        (("--hf-overrides", "[2]"), "a JSON object"),
        (("--hf-overrides", '{"n_recurent_loops": 2}'), r"n_recurent_loops' \(did you mean n_recurrent_loops\?\)"),
        (("--hf-overrides", '{"hidden_size": 2}'), "hidden_size.*\n.*the weights depend on the others"),
        (("--hf-overrides", '{"n_recurrent_loops": 1.5}'), "num_loops=1.5"),
        (("--hf-overrides", '{"n_recurrent_loops": "2"}'), "num_loops='2'"),
        (("--hf-overrides", '{"recurrent_kv_cache_mode": "every_loop"}'), "kv_mode='every_loop'"),
        (("--hf-overrides", '{"n_recurrent_loops": 2}', "--num-loops", "2"), "n_recurrent_loops, and --num-loops"),
        (("--num-loops", "0"), "num_loops=0"),
        (("--prefill-chunk", "0"), "prefill_chunk=0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given, named):
    with pytest.raises(ConfigError, match=named):
        arguments(*given)
