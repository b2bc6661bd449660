"""The usual evaluation harness runs on an export and on a server of it, with a task on this disk."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from megatron_dmtd.hf import DMTDQwen3ForCausalLM
from tests.functional.test_standalone import make_export
from tests.support.environments import make_environment, run_alone

ROOT = Path(__file__).parents[2]
QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " a cycle"], "gold": 0},
    {"question": "A cycle begins with its", "choices": [" France", " head", " parallel layers"], "gold": 1},
]
TASK = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: ""
metric_list:
  - metric: acc
"""
RUN = "from lm_eval.__main__ import cli_evaluate\ncli_evaluate()\n"


def log_likelihood(model: DMTDQwen3ForCausalLM, tokenizer, text: str, continuation: str) -> float:
    ids = tokenizer(text + continuation, return_tensors="pt")["input_ids"]
    first = len(tokenizer(text)["input_ids"])
    with torch.no_grad():
        log_p = model(ids).logits[0].log_softmax(dim=-1)
    return sum(log_p[column - 1, ids[0, column]].item() for column in range(first, ids.shape[1]))


def served_by(stack: ExitStack, export: Path) -> str:
    """A server of an export, and the address of its completions."""
    command = [sys.executable, "-W", "ignore", "tools/serve.py", export, "--port", "0", "--device", "cpu", "--model-name", "mine"]
    server = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    stack.callback(server.terminate)
    assert server.stdout is not None
    return server.stdout.readline().split()[-1] + "/completions"


@pytest.mark.slow
def test_lm_eval_gives_the_likelihoods_of_the_training_forward(tmp_path):
    """Through its Hugging Face backend, and from a server."""
    export = make_export(tmp_path, "bidirectional-refresh")
    (tmp_path / "tasks").mkdir()
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "tasks" / "local.yaml").write_text(TASK.format(data=data))
    script = tmp_path / "run.py"
    script.write_text(RUN)
    python = make_environment(tmp_path / "environment", ("lm-eval[api]",), with_dependencies=True)
    with ExitStack() as stack:
        address = served_by(stack, export)
        backends = {
            "hf": f"pretrained={export},trust_remote_code=True,dtype=float32",
            "local-completions": f"model=mine,base_url={address},tokenizer={export},tokenizer_backend=huggingface",
        }
        for name, settings in backends.items():
            arguments = ["--model", name, "--model_args", settings, "--tasks", "local_choice", "--batch_size", "2"]
            arguments += ["--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / name), "--log_samples"]
            run_alone(python, script, *arguments, *(["--device", "cpu"] if name == "hf" else []), cwd=tmp_path)
    model, tokenizer = DMTDQwen3ForCausalLM.from_pretrained(export).eval(), AutoTokenizer.from_pretrained(export)
    for name in backends:
        (samples,) = Path(tmp_path / name).rglob("samples_local_choice*.jsonl")
        found = [json.loads(line) for line in samples.read_text().splitlines()]
        assert len(found) == 2
        for sample in found:
            question = QUESTIONS[sample["doc_id"]]
            expected = [log_likelihood(model, tokenizer, question["question"], choice) for choice in question["choices"]]
            values = [float(response[0][0]) for response in sample["resps"]]
            assert all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(values, expected, strict=True))
            assert len({round(value, 3) for value in values}) == len(values)
