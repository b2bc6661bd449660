"""The usual evaluation harness runs on an export through its Hugging Face backend, with a task on this disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from megatron_dmtd.hf import DMTDQwen3ForCausalLM
from tests.functional.test_standalone import make_export
from tests.support.environments import make_environment, run_alone

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


@pytest.mark.slow
def test_lm_eval_gives_the_likelihoods_of_the_training_forward(tmp_path):
    export = make_export(tmp_path, "bidirectional-refresh")
    (tmp_path / "tasks").mkdir()
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "tasks" / "local.yaml").write_text(TASK.format(data=data))
    script = tmp_path / "run.py"
    script.write_text(RUN)
    python = make_environment(tmp_path / "environment", ("lm-eval",), with_dependencies=True)
    arguments = ["--model", "hf", "--model_args", f"pretrained={export},trust_remote_code=True,dtype=float32", "--device", "cpu"]
    arguments += ["--tasks", "local_choice", "--include_path", str(tmp_path / "tasks"), "--batch_size", "2"]
    run_alone(python, script, *arguments, "--output_path", str(tmp_path / "out"), "--log_samples", cwd=tmp_path)
    (samples,) = Path(tmp_path / "out").rglob("samples_local_choice*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(found) == 2
    model, tokenizer = DMTDQwen3ForCausalLM.from_pretrained(export).eval(), AutoTokenizer.from_pretrained(export)
    for sample in found:
        question = QUESTIONS[sample["doc_id"]]
        expected = [log_likelihood(model, tokenizer, question["question"], choice) for choice in question["choices"]]
        values = [float(response[0][0]) for response in sample["resps"]]
        assert all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(values, expected, strict=True))
        assert len({round(value, 3) for value in values}) == len(values)
