"""Online: token files, their packing into rows, and the batches that training takes."""
