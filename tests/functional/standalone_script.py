"""What a user of an export does with it, with torch and transformers alone. Run by test_standalone.py, outside this project.

Arguments: the export, a folder to write to. Each claim is asserted here; logits and greedy tokens go to the test, which has
another implementation to compare them with.
"""

import importlib.util
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, Trainer, TrainingArguments
from transformers.generation.streamers import BaseStreamer

SOURCE, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
CYCLE_LENGTH = 4
TEXTS = ["The capital", "A cycle begins with", "Paris."]
#: random weights soon repeat one token for ever, and every claim would pass on that
OPTIONS = {"max_new_tokens": 11, "no_repeat_ngram_size": 1, "suppress_tokens": [0, 1, 2]}


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True).eval()


class Collected(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


class OnlyEven(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 1::2] = -torch.inf
        return scores


def check_generation(model, tokenizer):
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    width = batch["input_ids"].shape[1]
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    assert len(set(lengths)) == 3 and not batch["attention_mask"][:, 0].all(), "unequal, padded on the left"
    modes = {
        "greedy": {"do_sample": False},
        "temperature": {"do_sample": True, "temperature": 1.7, "top_k": 0},
        "top_k": {"do_sample": True, "top_k": 9},
        "top_p": {"do_sample": True, "top_p": 0.8, "top_k": 0},
        "beams": {"do_sample": False, "num_beams": 2},
    }
    tokens = {}
    for name, mode in modes.items():
        for use_cache in (True, False):
            torch.manual_seed(3)
            made = model.generate(**batch, **OPTIONS, **mode, use_cache=use_cache)[:, width:]
            assert made.shape == (3, 11) and torch.equal(tokens.setdefault(name, made), made), (name, use_cache)
    assert len({str(made.tolist()) for made in tokens.values()}) == len(tokens), "every mode must show"
    greedy = tokens["greedy"]
    for row, length in enumerate(lengths):
        alone = batch["input_ids"][row : row + 1, width - length :]
        made = model.generate(alone, attention_mask=torch.ones_like(alone), **OPTIONS, do_sample=False)
        assert torch.equal(made[0, length:], greedy[row]), "a padded row is the row alone"
    row, step = next(
        (row, step)
        for row in range(3)
        for step in range(1, 10)
        if (lengths[row] + step) % CYCLE_LENGTH in (1, 2)
        and all(greedy[row, step] not in greedy[o] for o in range(3) if o != row)
    )
    stopped = model.generate(**batch, **OPTIONS, do_sample=False, eos_token_id=int(greedy[row, step]))[:, width:]
    assert torch.equal(stopped[row, : step + 1], greedy[row, : step + 1]) and (stopped[row, step + 1 :] == 1).all()
    assert all(torch.equal(stopped[other], greedy[other]) for other in range(3) if other != row)
    return batch, greedy


def check_streamer_and_processor(model, batch, greedy):
    one = {name: value[1:2] for name, value in batch.items()}
    streamer = Collected()
    model.generate(**one, **OPTIONS, do_sample=False, streamer=streamer)
    assert streamer.ended and streamer.tokens[-11:] == greedy[1].tolist()
    even = model.generate(**one, **OPTIONS, do_sample=False, logits_processor=LogitsProcessorList([OnlyEven()]))[0, -11:]
    assert (even % 2 == 0).all() and not (greedy[1] % 2 == 0).all()


def check_training(model, tokenizer):
    ids = tokenizer("A cycle begins with its head, and the parallel layers look ahead of it.")["input_ids"]
    rows = [{"input_ids": ids, "labels": ids}] * 8
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    arguments = TrainingArguments(
        output_dir=str(FOLDER / "run"),
        max_steps=8,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model.train(), args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 8 and losses[-1] < 0.7 * losses[0], losses
    assert all(not torch.equal(weight, before[name]) for name, weight in model.named_parameters()), "every weight must learn"
    trainer.save_model(str(FOLDER / "trained"))
    again, ids = load(FOLDER / "trained"), torch.tensor([ids])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    assert sorted(path.name for path in SOURCE.glob("*.py")) == sorted(path.name for path in (FOLDER / "trained").glob("*.py"))


def main():
    assert importlib.util.find_spec("megatron_dmtd") is None and importlib.util.find_spec("megatron") is not None, sys.path
    tokenizer = AutoTokenizer.from_pretrained(SOURCE, padding_side="left")
    model = load(SOURCE)
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (0, 1)
    batch, greedy = check_generation(model, tokenizer)
    check_streamer_and_processor(model, batch, greedy)
    with torch.no_grad():
        logits = model(**batch).logits
    torch.save({"batch": dict(batch), "logits": logits, "greedy": greedy}, FOLDER / "results.pt")
    check_training(model, tokenizer)
    print(transformers.__version__)


main()
