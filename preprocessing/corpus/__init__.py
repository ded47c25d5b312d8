"""Text processing for corpora: documents, sentences and tokens; process pool and work units."""
