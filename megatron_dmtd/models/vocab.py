"""The padded size of the vocabulary. Imports nothing, so that planners and converters can use it without torch."""


def padded_vocab_size(vocab_size: int, *, divisible_by: int = 128) -> int:
    """Rows of the embedding table as the trainer holds it: `vocab_size` rounded up to a multiple of `divisible_by`.

    It does not depend on the number of tensor-parallel ranks, so a checkpoint has the same shapes in every layout; up to 128
    ranks divide it. The extra rows are no token: they are zero in an import and cut off in an export.
    """
    assert vocab_size > 0 and divisible_by > 0, (vocab_size, divisible_by)
    return -(-vocab_size // divisible_by) * divisible_by
