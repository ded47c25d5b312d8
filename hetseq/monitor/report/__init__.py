"""Run reports: `report.html` and `hetseq report`, one file that opens from the shared file system.

`page` has the content, `charts` draws, `event_text` puts events into words, `compare` compares two runs, `command`
writes the file. They all read `recorded` and import no torch. No step calls this package.
"""
