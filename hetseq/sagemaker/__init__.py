"""SageMaker's model-parallel calls for FSDP scripts: `import hetseq.sagemaker as tsm`, without HetSeq's trainer.

A script calls `init` and `transform`, and takes `FSDP` and `offload_wrapper` from here; its loop, sampler and optimizer
stay its own. `configuration` reads the keys; `ranks` holds the process group and the mesh, and registers the backend
`smddp`; `sharding` gives torch's FSDP its mesh; `offload` is the offload with a horizon. Importing the package imports
torch, since a backend has to be known before `init_process_group`.
"""

from hetseq.sagemaker import ranks
from hetseq.sagemaker.job import init, transform
from hetseq.sagemaker.offload import offload_wrapper
from hetseq.sagemaker.sharding import FullyShardedDataParallel

FSDP = FullyShardedDataParallel

__all__ = ["FSDP", "FullyShardedDataParallel", "init", "offload_wrapper", "transform"]

ranks.register_smddp()
