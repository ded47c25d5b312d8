"""What HetSeq asks of the operating system: files, processes, the terminal, memory of devices, fault points."""
