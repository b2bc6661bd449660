import ast
from pathlib import Path

from megatron_dmtd.cycle import rule
from megatron_dmtd.hf import dmtd_cycles
from megatron_dmtd.hf.remote_code import code_files


def test_the_names_here_are_the_rule_itself():
    assert set(dmtd_cycles.__all__) >= {"visible", "shadow_ids", "cycle_id", "phase"}
    for name in dmtd_cycles.__all__:
        assert getattr(dmtd_cycles, name) is getattr(rule, name)


def test_exported_files_import_only_torch_transformers_each_other_and_the_standard_library():
    siblings = {Path(name).stem for name in code_files()}
    outside = set()
    for path in code_files().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in siblings
            elif isinstance(node, ast.ImportFrom):
                outside.add(node.module.split(".")[0])
            elif isinstance(node, ast.Import):
                outside |= {alias.name.split(".")[0] for alias in node.names}
    assert outside == {"__future__", "collections", "dataclasses", "torch", "transformers", "typing"}
