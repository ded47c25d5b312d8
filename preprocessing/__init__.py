"""Makes or fetches the data of the tasks; run as `python -m preprocessing.NAME`, never imported by HetSeq."""
