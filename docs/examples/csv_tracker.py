"""A tracker that keeps the loss of each step in a file of comma-separated values."""

import csv
from pathlib import Path


class CsvTracker:
    """`--tracker csv_tracker.py:CsvTracker`, or hetseq.start(trackers=[CsvTracker()])."""

    def begin(self, run_id, config, is_resumed):
        """Called before the first row. Says how many rows there are, so that none is lost or doubled."""
        path = Path(f"{config['save_dir']}/loss.csv")
        rows = len(path.read_text().splitlines()) if path.exists() else 0
        self.file = path.open("a", newline="")
        return rows

    def row(self, row):
        """A step has `loss`, a validation `valid_loss`; both are here."""
        csv.writer(self.file).writerow([row["step"], row.get("loss", row.get("valid_loss"))])
        self.file.flush()

    def event(self, kind, fields):
        """A loss of a rank, a checkpoint: `events.jsonl` has them."""

    def end(self, code):
        """0: the run is over; 75: it was stopped."""
        self.file.close()
