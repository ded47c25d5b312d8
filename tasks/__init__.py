"""What is trained: the tasks that come with HetSeq, built on nothing but the names that `hetseq` exports."""
