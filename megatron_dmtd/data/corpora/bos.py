"""BOS: whether documents and prompts begin with it, decided once for a corpus, its models and their prompts.

A corpus begins its documents as its tokenizer begins a text, unless something else was asked for; its manifest says so. Training
refuses mixtures and keeps the answer with the checkpoint; an export's tokenizer begins prompts in the same manner, whatever reads
it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from megatron_dmtd.data.batches.manifest import read_manifest
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer
from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.infra.special_tokens import Encode, added_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

AddBos = Literal["auto", "yes", "no"]


def ids_by(backend: Tokenizer) -> Encode:
    """What `added_ids` takes, of a tokenizer of the `tokenizers` library."""
    return lambda text, add_special_tokens: list(backend.encode(text, add_special_tokens=add_special_tokens).ids)


def bos_of(tokenizer: PreTrainedTokenizerFast, wanted: AddBos = "auto") -> int | None:
    """The id that documents begin with; None if they begin with their text.

    Raises `DataError` if BOS is wanted and the tokenizer has none, or it begins texts with several tokens.
    """
    if wanted == "no":
        return None
    before, _ = added_ids(ids_by(tokenizer.backend_tokenizer))
    if wanted == "yes" and not before:
        if tokenizer.bos_token_id is None:
            raise DataError(
                found="--add-bos yes with a tokenizer that has no BOS token",
                required="a BOS token",
                remedy="set bos_token in its tokenizer_config.json, or leave --add-bos out",
            )
        return int(tokenizer.bos_token_id)
    if len(before) > 1:
        raise DataError(
            found=f"a tokenizer that begins each text with {len(before)} tokens: {before}",
            required="at most one, BOS",
            remedy="use --add-bos no, or change the post_processor in its tokenizer.json",
        )
    return before[0] if before else None


def with_bos(tokenizer_json: str, bos: int | None) -> str:
    """The tokenizer that begins each text with `bos`, or with nothing, and ends it with nothing."""
    from tokenizers import Tokenizer

    fields = json.loads(tokenizer_json)
    contents = {token["id"]: token["content"] for token in fields["added_tokens"]}
    if bos is not None and bos not in contents:
        raise DataError(
            found=f"BOS id {bos}, which is no special token of the tokenizer",
            required=f"one of {sorted(contents)}",
            remedy="name the tokenizer that made the corpora",
        )
    steps = [step for step in _steps(fields.get("post_processor")) if not _adds_tokens(step)]
    if bos is not None:
        steps.append(_template(contents[bos], bos))
    fields["post_processor"] = None if not steps else steps[0] if len(steps) == 1 else {"type": "Sequence", "processors": steps}
    changed = json.dumps(fields, ensure_ascii=False)
    found = added_ids(ids_by(Tokenizer.from_str(changed)))
    assert found == ([] if bos is None else [bos], []), found
    return changed


def _steps(processor: dict[str, Any] | None) -> list[dict[str, Any]]:
    if processor is None:
        return []
    return list(copy.deepcopy(processor["processors"])) if processor["type"] == "Sequence" else [copy.deepcopy(processor)]


def _adds_tokens(step: dict[str, Any]) -> bool:
    return step["type"] in ("TemplateProcessing", "BertProcessing", "RobertaProcessing")


def _template(content: str, bos: int) -> dict[str, Any]:
    def begin(number: int) -> list[dict[str, Any]]:
        name = "AB"[number]
        return [{"SpecialToken": {"id": content, "type_id": number}}, {"Sequence": {"id": name, "type_id": number}}]

    special = {content: {"id": content, "ids": [bos], "tokens": [content]}}
    return {"type": "TemplateProcessing", "single": begin(0), "pair": begin(0) + begin(1), "special_tokens": special}


def bos_of_corpora(prefixes: Sequence[str]) -> AddBos:
    """How the documents of some token files begin; `auto` if no manifest says it. Raises `ConfigError` for a mixture."""
    found: dict[int | None, str] = {}
    for prefix in prefixes:
        manifest = read_manifest(prefix)
        if manifest is not None and manifest.add_bos != "template":
            found.setdefault(manifest.bos_token_id, prefix)
    if len(found) > 1:
        raise ConfigError(
            found="; ".join(f"{prefix} {_begins(bos)}" for bos, prefix in found.items()),
            required="corpora whose documents begin alike",
            remedy="make them again with the same tools/preprocess.py --add-bos",
        )
    return "auto" if not found else "no" if None in found else "yes"


def _begins(bos: int | None) -> str:
    return "without BOS" if bos is None else f"with BOS {bos} before each document"


def check_bos(prefix: str, tokenizer_dir: str) -> None:
    """Raise `DataError` if a model's prompts, by its tokenizer, begin otherwise than the documents of a corpus.

    Nothing to compare without a manifest, or with chats, which begin as their template says.
    """
    manifest = read_manifest(prefix)
    if manifest is None or manifest.add_bos == "template":
        return
    bos = bos_of(load_tokenizer(tokenizer_dir))
    if bos != manifest.bos_token_id:
        raise DataError(
            found=f"{prefix} {_begins(manifest.bos_token_id)}, and a model whose tokenizer ({tokenizer_dir}) "
            + ("begins texts without it" if bos is None else f"begins texts with BOS {bos}"),
            required="documents that begin as the model's prompts do",
            remedy=f"make the corpus again with --add-bos {'no' if bos is None else 'yes'} and the model's tokenizer",
        )
