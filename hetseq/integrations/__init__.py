"""Training loops of other libraries, driven by HetSeq through its public names."""
