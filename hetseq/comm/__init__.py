"""Collectives among ranks: nothing else in HetSeq calls torch.distributed."""
