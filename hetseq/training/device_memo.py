"""Remembers in the run directory how large a micro-batch a kind of device holds, so that later starts know it.

One small file for each model of device, `status/device-NAME.json`, written by the rank that found the size. If the file
cannot be written or read, the next start only spends a few steps on finding the size again.
"""

from __future__ import annotations

import json
import logging
import re
import socket

import torch

from hetseq.run_directory import RunDirectory, json_line, replace_file

logger = logging.getLogger(__name__)


class DeviceMemo:
    """The entry of the run directory for one model of device; for a CPU, the entry for this host."""

    def __init__(self, directory: RunDirectory, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._name = torch.cuda.get_device_name(device) if is_cuda else f"cpu of {socket.gethostname()}"
        self._path = directory.status / f"device-{re.sub('[^A-Za-z0-9]+', '-', self._name)}.json"

    def micro_batch(self) -> int | None:
        """The most samples that its memory is known to hold at once; None if nothing is known."""
        try:
            samples = json.loads(self._path.read_bytes())["micro_batch"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.info("%s cannot be used (%s): the size of micro-batches is found anew", self._path, error)
            return None
        if not isinstance(samples, int) or samples < 1:
            return None
        logger.info("micro-batches of at most %d samples, as an earlier start found out (%s)", samples, self._path)
        return samples

    def remember(self, samples: int) -> None:
        """Keep the most samples that its memory holds at once."""
        try:
            replace_file(self._path, json_line({"device": self._name, "micro_batch": samples}), is_durable=False)
        except OSError as error:
            logger.info("cannot write %s (%s): the next start finds it out anew", self._path, error.strerror)
