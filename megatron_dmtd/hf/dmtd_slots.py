"""Slots that attention reads, visibility among them, and the cycle-complete layout of a batch of rows.

Integers only: no weights and no caches. The file travels with every exported model as remote code.

Shape legend: B rows, W columns of the caller's ids, N slots of a row, U documents of a row, Q queries, K keys.
Dimension B of a slot table may be 1 if all rows have the same layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .configuration_dmtd_qwen3 import DMTDQwen3Config, refusal
from .dmtd_cycles import complete_length, visible

#: Query slots per attention call: bounds the size of a dense mask for long prompts.
QUERY_BLOCK = 512
#: Masks up to this many elements (bytes) are kept for the other layers of a forward pass; larger ones are made again.
KEPT_MASK_ELEMENTS = 2**28
#: Document of padding columns, which no token may read.
NOWHERE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """What `visible` needs of a slot: its stream, its document and its position there. All of shape `[B, N]`."""

    is_real_BN: torch.Tensor
    document_BN: torch.Tensor
    position_BN: torch.Tensor

    @classmethod
    def of(cls, document_BN: torch.Tensor, position_BN: torch.Tensor, *, is_real: bool) -> Slots:
        """Slots of a single stream."""
        is_real_BN = torch.full_like(position_BN, is_real, dtype=torch.bool)
        return cls(is_real_BN=is_real_BN, document_BN=document_BN, position_BN=position_BN)

    def followed_by(self, other: Slots) -> Slots:
        """These slots followed by the others, along the sequence."""
        return Slots(
            is_real_BN=torch.cat([self.is_real_BN, other.is_real_BN], dim=1),
            document_BN=torch.cat([self.document_BN, other.document_BN], dim=1),
            position_BN=torch.cat([self.position_BN, other.position_BN], dim=1),
        )

    def on(self, device: torch.device) -> Slots:
        """The same slots on `device`."""
        parts = (self.is_real_BN, self.document_BN, self.position_BN)
        is_real_BN, document_BN, position_BN = (part.to(device) for part in parts)
        return Slots(is_real_BN=is_real_BN, document_BN=document_BN, position_BN=position_BN)


class Visibility:
    """The visibility rule between query slots and key slots, as boolean masks in blocks of queries."""

    def __init__(self, queries: Slots, keys: Slots, config: DMTDQwen3Config) -> None:
        self.queries, self.keys, self.config = queries, keys, config
        self.num_queries = queries.position_BN.shape[1]
        self._keep = queries.position_BN.numel() * keys.position_BN.shape[1] <= KEPT_MASK_ELEMENTS
        self._kept: dict[tuple[int, int, int | None], torch.Tensor] = {}

    def on(self, device: torch.device) -> Visibility:
        """The same rule on `device`."""
        return Visibility(self.queries.on(device), self.keys.on(device), self.config)

    def blocks(self, first_query: int, window: int | None = None) -> Iterator[tuple[int, int, torch.Tensor]]:
        """`(start, stop, mask [B, stop - start, K])` for the queries from `first_query` on, in a layer with that window."""
        for start in range(first_query, self.num_queries, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, self.num_queries)
            mask_BQK = self._kept.get((start, stop, window))
            if mask_BQK is None:
                mask_BQK = self.mask(start, stop, window)
                if self._keep:
                    self._kept[start, stop, window] = mask_BQK
            yield start, stop, mask_BQK

    def mask(self, start: int, stop: int, window: int | None = None) -> torch.Tensor:
        """Whether each query slot of `[start, stop)` may read each key slot: bool `[B, stop - start, K]`."""
        query, key = self.queries, self.keys
        return visible(
            query_is_real=query.is_real_BN[:, start:stop, None],
            query_document=query.document_BN[:, start:stop, None],
            query_position=query.position_BN[:, start:stop, None],
            key_is_real=key.is_real_BN[:, None, :],
            key_document=key.document_BN[:, None, :],
            key_position=key.position_BN[:, None, :],
            cycle_length=self.config.mtp_horizon,
            history=self.config.dmtd_history_mode,
            block_attention=self.config.dmtd_block_attention,
            window=window,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The caller's columns: which hold tokens, in which document and at which position."""

    is_token_BW: torch.Tensor
    """False at padding."""
    document_BW: torch.Tensor
    """From 0 in each row; `NOWHERE` at padding."""
    position_BW: torch.Tensor
    """From 0 in each document; 0 at padding."""

    def slots(self) -> Slots:
        """The columns as the sequential layers see them."""
        return Slots.of(self.document_BW, self.position_BW, is_real=True)

    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self.is_token_BW.sum(dim=1).tolist()


def read_columns(
    input_ids_BW: torch.Tensor, attention_mask_BW: torch.Tensor | None, position_ids_BW: torch.Tensor | None
) -> Columns:
    """Document and position of each column, from the mask and the positions that the caller gave.

    Without positions a row is one document, counted from its first token. With positions, each 0 starts a new document.

    Raises:
        ValueError: The mask has another shape, the batch has no tokens, or positions do not count up from 0.
    """
    if attention_mask_BW is None:
        is_token_BW = torch.ones_like(input_ids_BW, dtype=torch.bool)
    elif attention_mask_BW.shape == input_ids_BW.shape:
        is_token_BW = attention_mask_BW.to(input_ids_BW.device) != 0
    else:
        raise refusal(
            found=f"attention_mask of shape {tuple(attention_mask_BW.shape)}",
            required=f"the shape of input_ids, {tuple(input_ids_BW.shape)}: 1 at tokens, 0 at padding",
            remedy="pass the tokenizer's attention_mask; tell packed documents apart by position_ids that restart at 0",
        )
    if not is_token_BW.any():
        raise refusal(found="a batch without tokens", required="at least one token", remedy="pass a prompt")
    rank_BW = is_token_BW.cumsum(dim=1) - 1
    position_BW = rank_BW if position_ids_BW is None else position_ids_BW.to(rank_BW.device).expand_as(rank_BW)
    starts_BW = is_token_BW & (position_BW == 0)
    start_rank_BW = torch.where(starts_BW, rank_BW, -1).cummax(dim=1).values
    wrong_BW = is_token_BW & ((start_rank_BW < 0) | (position_BW != rank_BW - start_rank_BW))
    if wrong_BW.any():
        row, column = wrong_BW.nonzero()[0].tolist()
        raise refusal(
            found=f"position_ids[{row}, {column}] = {int(position_BW[row, column])}",
            required="positions that count up by one from 0 in each document of a row",
            remedy="pass whole documents, or leave out position_ids",
        )
    return Columns(
        is_token_BW=is_token_BW,
        document_BW=(starts_BW.cumsum(dim=1) - 1).masked_fill(~is_token_BW, NOWHERE),
        position_BW=position_BW.masked_fill(~is_token_BW, 0),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CompleteLayout:
    """The tokens of a batch, with every document completed to whole cycles and padding removed.

    Decoding always computes whole blocks, so a trailing block has to be whole here too: with bidirectional blocks its tokens read
    the MASK slots that complete it. Slots after a row's last document form a document of their own, which nothing else reads.
    """

    tokens_BN: torch.Tensor
    """Token ids; the MASK id at slots without a token."""
    slot_of_column_BW: torch.Tensor
    """The slot of each column with a token; 0 at padding."""
    document_BN: torch.Tensor
    position_BN: torch.Tensor

    def slots(self, *, is_real: bool) -> Slots:
        """The slots of one stream."""
        return Slots.of(self.document_BN, self.position_BN, is_real=is_real)

    def take_columns(self, hidden_BNX: torch.Tensor) -> torch.Tensor:
        """`[B, N, X]` gathered back into the caller's columns `[B, W, X]`; padding gets the values of slot 0."""
        index_BWX = self.slot_of_column_BW[:, :, None].expand(-1, -1, hidden_BNX.shape[2])
        return hidden_BNX.gather(1, index_BWX)


def complete_layout(input_ids_BW: torch.Tensor, columns: Columns, config: DMTDQwen3Config) -> CompleteLayout:
    """Complete every document of every row to whole cycles (docs/method.md, sections 1.1, 1.4 and 6.2)."""
    num_documents = int(columns.document_BW.max()) + 1
    # Padding is counted in one additional bin, which is then dropped.
    bin_BW = columns.document_BW.masked_fill(~columns.is_token_BW, num_documents)
    counts_BU = torch.zeros(len(input_ids_BW), num_documents + 1, dtype=torch.int64, device=input_ids_BW.device)
    counts_BU.scatter_add_(1, bin_BW, torch.ones_like(bin_BW))
    complete_BU = complete_length(counts_BU[:, :num_documents], config.mtp_horizon)
    ends_BU = complete_BU.cumsum(dim=1)
    starts_BU = torch.nn.functional.pad(ends_BU, (1, 0))  # the last column: where the row's documents end
    num_slots = int(ends_BU[:, -1].max())

    slot_of_column_BW = starts_BU.gather(1, bin_BW) + columns.position_BW
    slot_of_column_BW = slot_of_column_BW.masked_fill(~columns.is_token_BW, 0)
    tokens_BN = input_ids_BW.new_full((len(input_ids_BW), num_slots), config.mask_token_id)
    row, column = columns.is_token_BW.nonzero(as_tuple=True)
    tokens_BN[row, slot_of_column_BW[row, column]] = input_ids_BW[row, column]

    slot_BN = torch.arange(num_slots, device=input_ids_BW.device).expand(len(input_ids_BW), -1).contiguous()
    document_BN = torch.searchsorted(ends_BU, slot_BN, right=True)
    position_BN = slot_BN - starts_BU.gather(1, document_BN)
    if bool((document_BN == document_BN[:1]).all()):  # positions are then equal too, and one mask serves every row
        document_BN, position_BN = document_BN[:1], position_BN[:1]
    return CompleteLayout(
        tokens_BN=tokens_BN, slot_of_column_BW=slot_of_column_BW, document_BN=document_BN, position_BN=position_BN
    )
