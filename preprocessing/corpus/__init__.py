"""From text to documents, sentences and tokens; work in several processes."""
