"""The tree is the architecture: who may import whom, who may know which library. Reads the sources with `ast`, imports none."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_dmtd"
#: the rooms from the lowest to the highest, some of them still to be built: each imports only from those before it
ORDER = (
    "errors",
    "infra",
    "cycle",
    "architecture",
    "quantization",
    "config",
    "families",
    "attention",
    "hf",
    "platform",
    "parallel",
    "models",
    "chats",
    "data",
    "weights",
    "training",
    "inference",
    "serving",
    "agents",
    "evaluation",
    "conversion",
    "rl",
    "vllm_plugin",
    "launch",
    "quickstart",
)
#: folders of a room, likewise
FOLDERS = {"data": ("batches", "corpora")}
#: rooms in which ranks run, and Megatron with them
MEGATRON_ROOMS = {"platform", "parallel", "models", "data", "weights", "training", "rl"}
#: torch.cuda is asked in `platform`; Transformer Engine's backend and CUDA graphs exist on CUDA alone
CUDA_FILES = {"attention/te.py", "inference/graphs.py"}
MOST_LINES = 550
#: modules of more lines than this, unless they only gather names, have a test file at their mirror path
UNTESTED_LINES = 40
#: one test file in so many, at most, tests the system as a whole, and so has no mirror path
OTHER_TESTS = 10

FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def room_of(path: Path) -> str:
    """The first folder or file under the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    """Dotted name of a file; that of a package for its `__init__`."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(tree: ast.AST, *, package: str = "") -> set[str]:
    """Dotted names that a source of `package` imports, at any depth, functions included; `from a.b import c` is `a.b.c`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def imports_of(path: Path) -> set[str]:
    module = module_of(path)
    return imported(tree_of(path), package=module if path.name == "__init__.py" else module.rpartition(".")[0])


def rooms_in(names: set[str]) -> set[str]:
    return {parts[1] for name in names if (parts := name.split("."))[0] == "megatron_dmtd" and len(parts) > 1}


def file_of(name: str) -> str | None:
    """The module that an imported name is, or is taken from. A name that a package's `__init__` imports is the package's."""
    package, _, last = name.rpartition(".")
    if package in MODULES and any(other.rpartition(".")[2] == last for other in imports_of(MODULES[package])):
        return package
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def mentions(tree: ast.Module, dotted: str) -> bool:
    """Whether a source imports `dotted`, or reads it as attributes."""
    if any(name == dotted or name.startswith(dotted + ".") for name in imported(tree)):
        return True
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) == dotted for node in ast.walk(tree))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def circle_in(edges: dict[str, set[str]]) -> list[str]:
    """A path from a node back to itself; empty if there is none."""
    done: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(edges.get(node, ())):
            if found := search(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := search(node, []))), [])


def test_the_checks_see_what_they_look_for():
    source = "import torch\ndef f():\n    from megatron_dmtd.training.loop import train\n    return torch.cuda.is_available()\n"
    assert rooms_in(imported(ast.parse(source))) == {"training"}
    assert mentions(ast.parse(source), "torch.cuda") and not mentions(ast.parse("import torch.cudagraphs"), "torch.cuda")
    assert mentions(ast.parse("from torch import cuda"), "torch.cuda")
    assert mentions(ast.parse("import megatron.core.utils"), "megatron")
    assert not mentions(ast.parse("import megatron_dmtd.cycle"), "megatron")
    assert rooms_in(imported(ast.parse("from megatron_dmtd import cycle"))) == {"cycle"}
    relative = ast.parse("from .b import c\nfrom . import d\nfrom ..e import f")
    assert imported(relative, package="x.y") == {"x.y.b.c", "x.y.d", "x.e.f"}
    assert file_of("megatron_dmtd.cycle.rule.visible") == "megatron_dmtd.cycle.rule" and file_of("torch.cuda") is None
    assert circle_in({"a": {"b"}, "b": {"c", "d"}, "d": {"b"}}) == ["b", "d", "b"] and not circle_in({"a": {"b"}, "c": {"b"}})


def test_every_room_has_its_place_in_the_order():
    assert {room_of(path) for path in FILES} - {"__init__"} <= set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_imports_from_lower_rooms_only(path):
    room, others = room_of(path), rooms_in(imports_of(path))
    allowed = set() if room == "__init__" else {*ORDER[: ORDER.index(room)], room}
    assert others <= allowed


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) in FOLDERS], ids=name_of)
def test_a_folder_imports_from_lower_folders_of_its_room_only(path):
    room, order = room_of(path), FOLDERS[room_of(path)]
    inside = [name.split(".") for name in imports_of(path) if name.startswith(f"megatron_dmtd.{room}.")]
    folder = path.relative_to(PACKAGE / room).parts[0]
    allowed = order[: order.index(folder) + 1] if folder in order else ()
    assert {parts[2] for parts in inside} & set(order) <= set(allowed)


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions included. Importing a module runs its packages' `__init__` too; that does not count."""
    edges = {module: {file_of(name) for name in imports_of(path)} - {None, module} for module, path in MODULES.items()}
    assert sum(map(len, edges.values())) > 300
    assert circle_in(edges) == []


def test_inference_knows_nothing_of_training():
    names = set().union(*(imports_of(path) for path in FILES if room_of(path) == "inference"))
    files = {file_of(name) for name in names if name.startswith("megatron_dmtd.weights")}
    assert files == {"megatron_dmtd.weights.hf_directory"}, "other files of the room know Megatron"
    imports = rooms_in(names)
    assert imports <= set(ORDER[: ORDER.index("platform") + 1]) | {"weights", "inference"} and "cycle" in imports


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("megatron", MEGATRON_ROOMS),
        ("transformer_engine", {"attention"}),
        ("torch", set(ORDER) - {"config", "errors", "infra"}),
    ],
)
def test_libraries_are_known_where_they_belong(library, rooms):
    users = {path for path in FILES if mentions(tree_of(path), library)}
    assert {room_of(path) for path in users} <= rooms
    assert users, "nobody uses it: the check looks for the wrong name"


def test_transformer_engine_is_imported_in_one_file():
    assert [name_of(path) for path in FILES if mentions(tree_of(path), "transformer_engine")] == ["attention/te.py"]


def test_only_the_platform_asks_torch_for_cuda():
    users = {name_of(path) for path in FILES if mentions(tree_of(path), "torch.cuda")}
    assert {name for name in users if not name.startswith("platform/")} <= CUDA_FILES
    assert "platform/device.py" in users


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_can_be_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


def subject_of(test: Path) -> Path | None:
    """What a test file tests: `tests/a/test_b.py` tests `a/b.py` of the package, else of the repository, else of the tests."""
    place = test.relative_to(ROOT / "tests")
    name = place.name.removeprefix("test_")
    names = ("__init__.py", name) if name == "init.py" else (name,)
    paths = [folder / place.parent / name for folder in (PACKAGE, ROOT, ROOT / "tests") for name in names]
    return next((path for path in paths if path.is_file()), None)


def test_the_mirror_is_read_as_it_is_meant():
    assert subject_of(ROOT / "tests" / "cycle" / "test_rule.py") == PACKAGE / "cycle" / "rule.py"
    assert subject_of(ROOT / "tests" / "families" / "test_init.py") == PACKAGE / "families" / "__init__.py"
    assert subject_of(ROOT / "tests" / "tools" / "bench" / "test_decode.py") == ROOT / "tools" / "bench" / "decode.py"
    assert subject_of(ROOT / "tests" / "oracles" / "test_parallel_dmtd.py") == ROOT / "tests" / "oracles" / "parallel_dmtd.py"
    assert subject_of(Path(__file__)) is None


def test_most_test_files_stand_at_the_mirror_path_of_what_they_test():
    away = sorted(str(path.relative_to(ROOT)) for path in TESTS if subject_of(path) is None)
    assert OTHER_TESTS * len(away) <= len(TESTS), away


def test_every_module_of_some_length_has_a_test_file_at_its_mirror_path():
    tested = {subject_of(path) for path in TESTS}
    defining = {path for path in FILES if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree_of(path).body)}
    long = {path for path in defining if len(path.read_text().splitlines()) > UNTESTED_LINES}
    assert long and not sorted(name_of(path) for path in long - tested)
