"""Scripts that make or fetch training data; run as `python -m hetseq.preprocessing.NAME`, never imported by HetSeq."""

import importlib
import sys

if __name__ == "preprocessing":  # the folder at the top of a checkout: the same modules, see hetseq.system.short_names
    sys.modules[__name__] = importlib.import_module("hetseq.preprocessing")
