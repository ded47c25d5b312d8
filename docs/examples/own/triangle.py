"""`--lr-scheduler triangle`: up and down between 0 and the learning rate, again and again."""

from dataclasses import dataclass

from hetseq import register_lr_scheduler


@dataclass
class TriangleOptions:
    """Flags that come along with the schedule."""

    triangle_updates: int = 100


@register_lr_scheduler("triangle", options=TriangleOptions)
def triangle(config, options):
    """What `--lr-scheduler triangle` builds."""
    top, length = config.lr[0], options.triangle_updates

    def rate(num_updates, epoch):
        place = num_updates % length / length
        return top * min(2 * place, 2 - 2 * place)

    return rate
