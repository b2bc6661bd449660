"""From documents to batches: `corpora/` makes token files of documents, `batches/` makes batches of token files."""
