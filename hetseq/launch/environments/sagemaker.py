"""Amazon SageMaker: one process on each host of a training or processing job.

`resourceconfig.json` names all hosts, this host, the network interface and the groups of equal machines. If it cannot
be read, the toolkit's variables SM_* contain the same.
"""

from __future__ import annotations

import json
from typing import Any

from hetseq.launch.environments.detected import Look, Seen, UnreadableError, index_of

NAME = "sagemaker"
TRAINING, PROCESSING = "/opt/ml/input/config/resourceconfig.json", "/opt/ml/config/resourceconfig.json"
NEEDS = f"{TRAINING}, {PROCESSING}, or SM_HOSTS and SM_CURRENT_HOST"


def see(look: Look) -> Seen | None:
    """The process of one host."""
    resources, source = _resources(look)
    if resources is None:
        return None
    hosts: Any = resources.get("hosts")
    host: Any = resources.get("current_host")
    if not _are_names(hosts) or host not in hosts:
        raise UnreadableError(f"{source}: expected `hosts`, a list of names, and `current_host`, one of them")
    # the toolkit reads the first name, but writes the second one into its own replacement of the file
    group = resources.get("current_group_name") or resources.get("current_instance_group")
    gpus = look.number("SM_NUM_GPUS")
    return Seen(
        NAME,
        _job_of(look, hosts),
        tuple(hosts),
        source + (f", group {group}" if group else ""),
        slots=(gpus,) if gpus and len(hosts) == 1 else (),
        index=index_of(host, hosts),
        nodes=len(hosts),
        processes=len(hosts),
        interface=resources.get("network_interface_name") or look.get("SM_NETWORK_INTERFACE_NAME"),
        group=group,
    )


def _resources(look: Look) -> tuple[dict[str, Any] | None, str]:
    for path in (TRAINING, PROCESSING):
        if (text := look.read(path)) is not None:
            return _object(text, path), path
    if text := look.get("SM_RESOURCE_CONFIG"):
        return _object(text, "SM_RESOURCE_CONFIG"), "SM_RESOURCE_CONFIG"
    hosts, host = look.get("SM_HOSTS"), look.get("SM_CURRENT_HOST")
    if hosts is None or host is None:
        return None, ""
    try:
        return {"hosts": json.loads(hosts), "current_host": host}, "SM_HOSTS"
    except ValueError as error:
        raise UnreadableError(f"SM_HOSTS={hosts}: expected a list of names as JSON") from error


def _object(text: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UnreadableError(f"{source}: this is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnreadableError(f"{source}: expected a JSON object with `hosts` and `current_host`")
    return value


def _are_names(hosts: object) -> bool:
    return isinstance(hosts, list) and bool(hosts) and all(isinstance(host, str) and host for host in hosts)


def _job_of(look: Look, hosts: list[str]) -> str:
    """The name of the job, needed because every job calls its hosts algo-1, algo-2, ..."""
    return " ".join([look.get("TRAINING_JOB_NAME", "PROCESSING_JOB_NAME") or "", *sorted(hosts)]).strip()
