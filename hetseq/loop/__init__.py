"""A training loop of the user's own: a script drives the engine that also trains tasks.

    run = hetseq.start()
    model, optimizer = run.own(model, optimizer)
    for step in run.steps(data, global_batch_size=64, max_epoch=3):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))
        print(step.number, step.loss)

The one idea: the inner loop is the transaction. When its micro-batches are used up, its iterator reduces, commits,
clips and updates. If the step has to be repeated, because a peer was lost, it gives micro-batches of the same step
again, and it ends only when all ranks have applied the step. So no exception has to travel through the user's frames,
and what stands behind the inner loop runs once for each step.

This package knows no processes and no files; `launch.script_worker` starts it.
"""
