"""`report.html` and `hetseq report`: what a run was, as one file that opens from the shared file system.

`page` says what stands in it, `charts` draws, `remedies` puts events into words, `compare` tells two runs apart,
`writing` puts the file there and is the command. All of it reads `hetseq.recorded` and imports no torch. Nothing here
is called in a step.
"""
