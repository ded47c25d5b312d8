"""HetSeq's access to the operating system: files, processes, the terminal, device memory, fault points."""
