"""What a run shows: metrics, the terminal, TensorBoard, status files, advice, the report."""
