"""The recipes: each can run as it says, and is the model and variant of its name."""

import dataclasses
import re
from pathlib import Path

import pytest

from megatron_dmtd.config import Config, from_yaml, validate
from megatron_dmtd.cycle import VANILLA, VARIANTS

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "examples").glob("*/*.yaml"))
#: name -> layers, parallel layers, hidden, feed-forward, heads, key-value heads, head width, vocabulary, rope, q/k norm, MASK
SHAPES = {
    "qwen3-4b": (36, 28, 2560, 9728, 32, 8, 128, 151936, 1e6, True, 151660),
    "smollm2-135m": (30, 23, 576, 1536, 9, 3, 64, 49152, 1e5, False, 16),
    "quickstart": (9, 6, 128, 384, 4, 2, 32, 768, 1e4, True, 2),
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def shape_of(config: Config) -> tuple:
    model, cycle = config.model, config.cycle
    return (
        model.num_layers,
        cycle.num_parallel_layers,
        model.hidden_size,
        model.intermediate_size,
        model.num_attention_heads,
        model.num_key_value_heads,
        model.head_dim,
        model.vocab_size,
        model.rope_theta,
        model.qk_norm,
        cycle.mask_token_id,
    )


def test_there_is_a_recipe_for_each_model_and_variant():
    found = {name_of(path) for path in RECIPES}
    large = {f"examples/{model}/{variant}.yaml" for model in ("qwen3-4b", "smollm2-135m") for variant in (VANILLA, *VARIANTS)}
    assert found == large | {f"examples/quickstart/{name}.yaml" for name in ("base", "vanilla", "bidirectional-refresh")}


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_validates_for_the_processes_that_it_names(path):
    config = from_yaml(path)
    (launch,) = re.findall(
        rf"^#   (?:torchrun --nproc-per-node (\d+)|python) tools/train.py --config {name_of(path)}", path.read_text(), re.M
    )
    processes = int(launch or 1)
    validate(config, world_size=processes)
    assert processes == {"quickstart": 2, "qwen3-4b": 8, "smollm2-135m": 1}[path.parent.name]


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_is_the_model_and_variant_of_its_name(path):
    config = from_yaml(path)
    assert shape_of(config) == SHAPES[path.parent.name]
    assert config.model.tie_word_embeddings
    assert config.cycle.variant == ("vanilla" if path.stem == "base" else path.stem)
    assert path.stem in config.checkpoint.dir and path.stem in config.logging.dir


@pytest.mark.parametrize("folder", sorted(SHAPES))
def test_recipes_of_a_model_differ_in_nothing_but_variant_and_folders(folder):
    common = set()
    paths = (ROOT / "examples" / folder).glob("*.yaml")
    for path in sorted(path for path in paths if path.stem != "base"):
        config = from_yaml(path)
        common.add(
            dataclasses.replace(
                config,
                cycle=dataclasses.replace(config.cycle, variant=VANILLA),
                checkpoint=dataclasses.replace(config.checkpoint, dir=""),
                logging=dataclasses.replace(config.logging, dir=""),
            )
        )
    assert len(common) == 1


def test_requirements_never_name_the_other_apex():
    for path in ROOT.glob("requirements*.txt"):
        names = [
            re.split(r"[\[=<>~! ]", line)[0].lower() for line in path.read_text().splitlines() if line and line[0] not in "#-"
        ]
        assert names and "apex" not in names
