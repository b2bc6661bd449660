"""Slots that attention reads, visibility among them, and the cycle-complete layout of a batch of rows.

Integers only: no weights and no caches. The file travels with every exported model as remote code.

Shape legend: B rows, n columns of the caller's ids, N slots of the cycle-complete layout, D documents of a row, T slots, Q query
slots, K key slots. Dimension B of a slot table may be 1 if all rows have the same layout.
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
    """What `visible` needs of a slot: its stream, its document and its position there. All of shape `[B, T]`."""

    is_real_BT: torch.Tensor
    document_BT: torch.Tensor
    position_BT: torch.Tensor

    @classmethod
    def of(cls, document_BT: torch.Tensor, position_BT: torch.Tensor, *, is_real: bool) -> Slots:
        """Slots of a single stream."""
        is_real_BT = torch.full_like(position_BT, is_real, dtype=torch.bool)
        return cls(is_real_BT=is_real_BT, document_BT=document_BT, position_BT=position_BT)

    def followed_by(self, other: Slots) -> Slots:
        """These slots followed by the others, along the sequence."""
        return Slots(
            is_real_BT=torch.cat([self.is_real_BT, other.is_real_BT], dim=1),
            document_BT=torch.cat([self.document_BT, other.document_BT], dim=1),
            position_BT=torch.cat([self.position_BT, other.position_BT], dim=1),
        )

    def on(self, device: torch.device) -> Slots:
        """The same slots on `device`."""
        parts = (self.is_real_BT, self.document_BT, self.position_BT)
        is_real_BT, document_BT, position_BT = (part.to(device) for part in parts)
        return Slots(is_real_BT=is_real_BT, document_BT=document_BT, position_BT=position_BT)


class Visibility:
    """The visibility rule between query slots and key slots, as boolean masks in blocks of queries."""

    def __init__(self, queries: Slots, keys: Slots, config: DMTDQwen3Config) -> None:
        self.queries, self.keys, self.config = queries, keys, config
        self.num_queries = queries.position_BT.shape[1]
        self._keep = queries.position_BT.numel() * keys.position_BT.shape[1] <= KEPT_MASK_ELEMENTS
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
            query_is_real=query.is_real_BT[:, start:stop, None],
            query_document=query.document_BT[:, start:stop, None],
            query_position=query.position_BT[:, start:stop, None],
            key_is_real=key.is_real_BT[:, None, :],
            key_document=key.document_BT[:, None, :],
            key_position=key.position_BT[:, None, :],
            cycle_length=self.config.mtp_horizon,
            history=self.config.dmtd_history_mode,
            block_attention=self.config.dmtd_block_attention,
            window=window,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The caller's columns: which hold tokens, in which document and at which position."""

    is_token_Bn: torch.Tensor
    """False at padding."""
    document_Bn: torch.Tensor
    """From 0 in each row; `NOWHERE` at padding."""
    position_Bn: torch.Tensor
    """From 0 in each document; 0 at padding."""

    def slots(self) -> Slots:
        """The columns as the sequential layers see them."""
        return Slots.of(self.document_Bn, self.position_Bn, is_real=True)

    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self.is_token_Bn.sum(dim=1).tolist()


def read_columns(
    input_ids_Bn: torch.Tensor, attention_mask_Bn: torch.Tensor | None, position_ids_Bn: torch.Tensor | None
) -> Columns:
    """Document and position of each column, from the mask and the positions that the caller gave.

    Without positions a row is one document, counted from its first token. With positions, each 0 starts a new document.

    Raises:
        ValueError: The mask has another shape, the batch has no tokens, or positions do not count up from 0.
    """
    if attention_mask_Bn is None:
        is_token_Bn = torch.ones_like(input_ids_Bn, dtype=torch.bool)
    elif attention_mask_Bn.shape == input_ids_Bn.shape:
        is_token_Bn = attention_mask_Bn.to(input_ids_Bn.device) != 0
    else:
        raise refusal(
            found=f"attention_mask of shape {tuple(attention_mask_Bn.shape)}",
            required=f"the shape of input_ids, {tuple(input_ids_Bn.shape)}: 1 at tokens, 0 at padding",
            remedy="pass the tokenizer's attention_mask; tell packed documents apart by position_ids that restart at 0",
        )
    if not is_token_Bn.any():
        raise refusal(found="a batch without tokens", required="at least one token", remedy="pass a prompt")
    rank_Bn = is_token_Bn.cumsum(dim=1) - 1
    position_Bn = rank_Bn if position_ids_Bn is None else position_ids_Bn.to(rank_Bn.device).expand_as(rank_Bn)
    starts_Bn = is_token_Bn & (position_Bn == 0)
    start_rank_Bn = torch.where(starts_Bn, rank_Bn, -1).cummax(dim=1).values
    wrong_Bn = is_token_Bn & ((start_rank_Bn < 0) | (position_Bn != rank_Bn - start_rank_Bn))
    if wrong_Bn.any():
        row, column = wrong_Bn.nonzero()[0].tolist()
        raise refusal(
            found=f"position_ids[{row}, {column}] = {int(position_Bn[row, column])}",
            required="positions that count up by one from 0 in each document of a row",
            remedy="pass whole documents, or leave out position_ids",
        )
    return Columns(
        is_token_Bn=is_token_Bn,
        document_Bn=(starts_Bn.cumsum(dim=1) - 1).masked_fill(~is_token_Bn, NOWHERE),
        position_Bn=position_Bn.masked_fill(~is_token_Bn, 0),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CompleteLayout:
    """The tokens of a batch, with every document completed to whole cycles and padding removed.

    Decoding always computes whole blocks, so a trailing block has to be whole here too: with bidirectional blocks its tokens read
    the MASK slots that complete it. Slots after a row's last document form a document of their own, which nothing else reads.
    """

    tokens_BN: torch.Tensor
    """Token ids; the MASK id at slots without a token."""
    slot_of_column_Bn: torch.Tensor
    """The slot of each column with a token; 0 at padding."""
    document_BN: torch.Tensor
    position_BN: torch.Tensor

    def slots(self, *, is_real: bool) -> Slots:
        """The slots of one stream."""
        return Slots.of(self.document_BN, self.position_BN, is_real=is_real)

    def take_columns(self, hidden_BNX: torch.Tensor) -> torch.Tensor:
        """`[B, N, X]` gathered back into the caller's columns `[B, n, X]`; padding gets the values of slot 0."""
        index_BnX = self.slot_of_column_Bn[:, :, None].expand(-1, -1, hidden_BNX.shape[2])
        return hidden_BNX.gather(1, index_BnX)


def complete_layout(input_ids_Bn: torch.Tensor, columns: Columns, config: DMTDQwen3Config) -> CompleteLayout:
    """Complete every document of every row to whole cycles (docs/method.md, sections 1.1, 1.4 and 6.2)."""
    num_documents = int(columns.document_Bn.max()) + 1
    # Padding is counted in one additional bin, which is then dropped.
    bin_Bn = columns.document_Bn.masked_fill(~columns.is_token_Bn, num_documents)
    counts_BD = torch.zeros(len(input_ids_Bn), num_documents + 1, dtype=torch.int64, device=input_ids_Bn.device)
    counts_BD.scatter_add_(1, bin_Bn, torch.ones_like(bin_Bn))
    complete_BD = complete_length(counts_BD[:, :num_documents], config.mtp_horizon)
    ends_BD = complete_BD.cumsum(dim=1)
    starts_BD = torch.nn.functional.pad(ends_BD, (1, 0))  # the last column: where the row's documents end
    num_slots = int(ends_BD[:, -1].max())

    slot_of_column_Bn = starts_BD.gather(1, bin_Bn) + columns.position_Bn
    slot_of_column_Bn = slot_of_column_Bn.masked_fill(~columns.is_token_Bn, 0)
    tokens_BN = input_ids_Bn.new_full((len(input_ids_Bn), num_slots), config.mask_token_id)
    row, column = columns.is_token_Bn.nonzero(as_tuple=True)
    tokens_BN[row, slot_of_column_Bn[row, column]] = input_ids_Bn[row, column]

    slot_BN = torch.arange(num_slots, device=input_ids_Bn.device).expand(len(input_ids_Bn), -1).contiguous()
    document_BN = torch.searchsorted(ends_BD, slot_BN, right=True)
    position_BN = slot_BN - starts_BD.gather(1, document_BN)
    if bool((document_BN == document_BN[:1]).all()):  # positions are then equal too, and one mask serves every row
        document_BN, position_BN = document_BN[:1], position_BN[:1]
    return CompleteLayout(
        tokens_BN=tokens_BN, slot_of_column_Bn=slot_of_column_Bn, document_BN=document_BN, position_BN=position_BN
    )
