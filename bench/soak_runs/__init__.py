"""What `bench/soak.py` starts: one small model, and a training script for each system that it compares.

The scripts for torchrun and torchft import torch, and torchft where it is used, but nothing of HetSeq.
"""
