"""The cache of cycled decoding: parallel layers' K/V, sequential layers' K/V, and the current cycle's shadow hidden states.

It stores and returns tensors; the model computes them. Rows of a batch may be at different phases, so every row has its own
length, and entry j of a row holds position j. The file travels with every exported model as remote code.

Shape legend: B rows, R selected rows, C cycle length, N slots of a row, G key/value heads, D head width, X hidden size.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache

from .configuration_dmtd_qwen3 import DMTDQwen3Config, refusal
from .dmtd_cycles import parallel_entries

FIRST_CAPACITY = 64


class DMTDCache(Cache):
    """What decoding keeps between tokens (docs/method.md, sections 6 to 9).

    - A sequential layer holds K and V of every token, and never a MASK.
    - With history "real" a parallel layer holds real K and V of the cycles strictly before that of the last token. The cycle of
      the last token is added at the next cycle head, in the same pass as that head's shadow block. With history "shadow" a
      parallel layer holds shadow K and V of every cycle, including the current one.
    - `shadow_hidden_BCX` are the parallel hidden states of the current cycle, `cycle_ids_BC` its tokens so far.

    The lengths of both kinds of layer follow from `lengths`, so the two cannot disagree.
    """

    def __init__(self, config: DMTDQwen3Config) -> None:
        super().__init__(layers=[])
        self.cycle_length = config.mtp_horizon
        self.history = config.dmtd_history_mode
        self.num_layers, self.num_parallel_layers = config.num_hidden_layers, config.num_parallel_layers
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.num_columns = 0
        """Columns of ids processed so far, padding included: what transformers calls the sequence length."""
        self.lengths: list[int] = []
        """Tokens of each row processed so far."""
        self.shadow_hidden_BCX: torch.Tensor | None = None
        self.cycle_ids_BC: torch.Tensor | None = None
        self._keys: list[torch.Tensor | None] = [None] * self.num_layers
        self._values: list[torch.Tensor | None] = [None] * self.num_layers

    def layer_lengths(self, layer: int) -> list[int]:
        """Number of entries of each row in use at one layer."""
        if layer >= self.num_parallel_layers:
            return list(self.lengths)
        return [parallel_entries(length, cycle_length=self.cycle_length, history=self.history) for length in self.lengths]

    def row(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[N, G, D]` of one row at one layer, by position."""
        length = self.layer_lengths(layer)[row]
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None and values is not None, f"layer {layer} has not been written"
        return keys[row, :length], values[row, :length]

    def write(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        row: torch.Tensor,
        position: torch.Tensor,
        capacity: int,
    ) -> None:
        """Store K and V `[..., G, D]` at `row` and `position`, two index tensors that broadcast to `[...]`.

        `capacity` is at least the largest position plus one. Layers and their entries may be on several devices.
        """
        row, position = row.to(key.device), position.to(key.device)
        for store, new in ((self._keys, key), (self._values, value)):
            buffer = _grown(store[layer], new, batch_size=len(self.lengths), capacity=capacity)
            buffer[row, position] = new
            store[layer] = buffer

    def read(self, layer: int, *, row_R: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[R, length, G, D]` of rows in ascending order; the mask has to hide entries past a row's own length."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            raise AssertionError(f"layer {layer} has not been written")
        if len(row_R) == len(self.lengths):
            return keys[:, :length], values[:, :length]
        row_R = row_R.to(keys.device)
        return keys[row_R, :length], values[row_R, :length]

    # What transformers expects of a cache.

    def get_seq_length(self, layer_idx: int = 0, *args, **kwargs) -> int:
        """Columns of ids processed so far, padding included."""
        return self.num_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no maximum."""
        return -1

    def __len__(self) -> int:
        return self.num_layers

    @property
    def is_linear(self) -> list[bool]:
        """No layer is linear attention."""
        return [False] * self.num_layers

    @property
    def is_sliding(self) -> list[bool]:
        """No layer drops what has left its window: masks hide it."""
        return [False] * self.num_layers

    @property
    def is_compileable(self) -> bool:
        """False: buffers grow, and cycle heads differ from other steps, so no single graph serves every step."""
        return False

    @property
    def is_croppable(self) -> bool:
        """See `crop`."""
        return False

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first token."""
        return len(self.lengths) or -1

    def update(self, *args, **kwargs):
        """Refused: only `DMTDQwen3Model` knows which K and V persist."""
        raise refusal(
            found="Cache.update on a DMTDCache",
            required="the model that made this cache: shadow K and V are not all kept",
            remedy="pass the cache to a DMTDQwen3 model only",
        )

    def crop(self, *args, **kwargs) -> None:
        """Refused: an earlier cycle's shadow hidden states are gone, so decoding cannot re-enter it in the middle."""
        raise refusal(
            found="a request to crop a DMTDCache (assisted decoding and speculative rollback do so)",
            required="decoding that only moves forward: earlier cycles' shadow hidden states are not kept",
            remedy="decode without an assistant, or prefill the shorter text into a new cache",
        )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue row `beam_idx[i]` (beam search)."""
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows in `indices`, in that order."""
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, next to itself."""
        self._select_rows(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def _select_rows(self, index: torch.Tensor) -> None:
        def chosen(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.index_select(0, index.to(tensor.device))

        self.lengths = [self.lengths[row] for row in index.tolist()]
        self._keys, self._values = [chosen(key) for key in self._keys], [chosen(value) for value in self._values]
        self.shadow_hidden_BCX, self.cycle_ids_BC = chosen(self.shadow_hidden_BCX), chosen(self.cycle_ids_BC)


def _grown(buffer: torch.Tensor | None, like: torch.Tensor, *, batch_size: int, capacity: int) -> torch.Tensor:
    """`buffer` with room for `capacity` entries per row. Zeros, since a masked NaN would still poison its row's attention."""
    if buffer is not None and buffer.shape[1] >= capacity:
        return buffer
    old = 0 if buffer is None else buffer.shape[1]
    grown = like.new_zeros((batch_size, max(FIRST_CAPACITY, capacity, 2 * old), *like.shape[-2:]))
    if buffer is not None:
        grown[:, :old] = buffer
    return grown
