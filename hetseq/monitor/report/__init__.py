"""`report.html` and `hetseq report`: what a run was, as one file that opens from the shared file system.

`page` holds its content, `charts` draws, `event_text` puts events into words, `compare` compares two runs, `command`
writes the file. All of it reads `recorded` and imports no torch. Nothing here is called in a step.
"""
