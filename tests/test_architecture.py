"""The tree is the architecture: who may import whom, who may know which library. Reads the sources with `ast`, imports none."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_dmtd"
#: room -> layer; a room imports from lower layers only
LAYERS = {
    "errors": 0,
    "cycle": 0,
    "architecture": 0,
    "config": 0,
    "families": 1,
    "attention": 1,
    "hf": 1,
    "platform": 1,
    "parallel": 2,
    "data": 2,
    "models": 2,
    "training": 3,
    "conversion": 3,
    "inference": 4,
    "launch": 4,
    "quickstart": 4,
    "serving": 5,
}
#: the only imports between two rooms of one layer
SAME_LAYER = {
    ("cycle", "errors"),
    ("config", "errors"),
    ("config", "cycle"),
    ("config", "architecture"),
    ("architecture", "cycle"),
    ("models", "parallel"),  # a stage's layers are those of its placement
    ("quickstart", "inference"),  # its report decodes with the engine
    ("conversion", "training"),  # checkpoints lie where training.paths says
}
MEGATRON_ROOMS = {"platform", "models", "parallel", "data", "training", "conversion"}
#: torch.cuda is asked in `platform`; Transformer Engine's backend and CUDA graphs exist on CUDA alone
CUDA_FILES = {"attention/te.py", "inference/graphs.py"}
MOST_LINES = 550

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The first folder or file under the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(source: str) -> set[str]:
    """Dotted names that a source imports, at any depth; `from a.b import c` is `a.b.c`. Relative ones stay in their room."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_imported(source: str) -> set[str]:
    return {parts[1] for name in imported(source) if (parts := name.split("."))[0] == "megatron_dmtd" and len(parts) > 1}


def mentions(source: str, dotted: str) -> bool:
    """Whether a source imports `dotted`, or reads it as attributes."""
    if any(name == dotted or name.startswith(dotted + ".") for name in imported(source)):
        return True
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) == dotted for node in ast.walk(ast.parse(source)))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_the_checks_see_what_they_look_for():
    source = "import torch\ndef f():\n    from megatron_dmtd.training.loop import train\n    return torch.cuda.is_available()\n"
    assert rooms_imported(source) == {"training"}
    assert mentions(source, "torch.cuda") and not mentions("import torch.cudagraphs", "torch.cuda")
    assert mentions("from torch import cuda", "torch.cuda")
    assert mentions("import megatron.core.utils", "megatron") and not mentions("import megatron_dmtd.cycle", "megatron")
    assert rooms_imported("from megatron_dmtd import cycle") == {"cycle"}


def test_every_room_has_a_layer():
    assert {room_of(path) for path in FILES} - {"__init__"} == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_imports_from_lower_layers_only(path):
    room = room_of(path)
    if room == "__init__":
        assert rooms_imported(path.read_text()) == set()
        return
    upward = {
        other
        for other in rooms_imported(path.read_text()) - {room}
        if LAYERS[other] >= LAYERS[room] and (room, other) not in SAME_LAYER
    }
    assert not upward


def test_each_exception_between_rooms_of_one_layer_is_used():
    used = {(room_of(path), other) for path in FILES for other in rooms_imported(path.read_text())}
    assert used >= SAME_LAYER


def test_inference_knows_nothing_of_training():
    imports = set().union(*(rooms_imported(path.read_text()) for path in FILES if room_of(path) == "inference"))
    assert imports <= {"errors", "cycle", "config", "attention", "hf", "platform", "inference"} and "hf" in imports


@pytest.mark.parametrize(
    ("library", "rooms"),
    [("megatron", MEGATRON_ROOMS), ("transformer_engine", {"attention"}), ("torch", set(LAYERS) - {"config", "errors"})],
)
def test_libraries_are_known_where_they_belong(library, rooms):
    users = {path for path in FILES if mentions(path.read_text(), library)}
    assert {room_of(path) for path in users} <= rooms
    assert users, "nobody uses it: the check looks for the wrong name"


def test_transformer_engine_is_imported_in_one_file():
    assert [name_of(path) for path in FILES if mentions(path.read_text(), "transformer_engine")] == ["attention/te.py"]


def test_only_the_platform_asks_torch_for_cuda():
    users = {name_of(path) for path in FILES if mentions(path.read_text(), "torch.cuda")}
    assert {name for name in users if not name.startswith("platform/")} <= CUDA_FILES
    assert "platform/device.py" in users


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_can_be_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES
