"""The code that travels with an export, so that torch and transformers alone can load it with `trust_remote_code=True`.

The rule of cycles is `cycle/rule.py`, verbatim, under the name by which the other files import it.
"""

from __future__ import annotations

from pathlib import Path

from megatron_dmtd.cycle import rule

AUTO_MAP = {
    "AutoConfig": "configuration_dmtd_qwen3.DMTDQwen3Config",
    "AutoModel": "modeling_dmtd_qwen3.DMTDQwen3Model",
    "AutoModelForCausalLM": "modeling_dmtd_qwen3.DMTDQwen3ForCausalLM",
}
_FILES = ("configuration_dmtd_qwen3.py", "dmtd_slots.py", "dmtd_cache.py", "dmtd_layers.py", "modeling_dmtd_qwen3.py")


def code_files() -> dict[str, Path]:
    """Each file of code: its name in an export, and where its text is."""
    here = {name: Path(__file__).with_name(name) for name in _FILES}
    return here | {"dmtd_cycles.py": Path(rule.__file__)}
