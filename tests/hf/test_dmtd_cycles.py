import ast
from pathlib import Path

import megatron_dmtd.hf
from megatron_dmtd.cycle import rule
from megatron_dmtd.hf import dmtd_cycles
from megatron_dmtd.hf.export import CODE_FILES


def test_the_names_here_are_the_rule_itself():
    assert set(dmtd_cycles.__all__) >= {"visible", "shadow_ids", "cycle_id", "phase"}
    for name in dmtd_cycles.__all__:
        assert getattr(dmtd_cycles, name) is getattr(rule, name)


def test_exported_files_import_only_torch_transformers_each_other_and_the_standard_library():
    folder = Path(megatron_dmtd.hf.__file__).parent
    siblings = {Path(name).stem for name in (*CODE_FILES, "dmtd_cycles.py")}
    outside = set()
    for name in CODE_FILES:
        for node in ast.walk(ast.parse((folder / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in siblings
            elif isinstance(node, ast.ImportFrom):
                outside.add(node.module.split(".")[0])
            elif isinstance(node, ast.Import):
                outside |= {alias.name.split(".")[0] for alias in node.names}
    assert outside == {"__future__", "collections", "dataclasses", "torch", "transformers", "typing"}
