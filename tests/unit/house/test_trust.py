"""No byte of a stranger is unpickled or run: whatever could do that is not in the code at all.

`test_house.py` forbids pickle and its kin, object collectives, `eval` and unsafe YAML. Here: what unpickles without
saying so, and what opens a port to everybody. The arguments of a worker's process are pickled by the standard library,
between two processes of one user and over a pipe that has no name; everything else on a pipe is JSON (`recv_bytes`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.unit.house.test_house import READER_FOR_OTHERS, ROOT, _names, _tree, breaches

FOLDERS = ("hetseq", "tasks", "preprocessing")
#: makes torch's own process group for an FSDP script, which has no secret of ours; docs/guides/security.md says so
GROUP_OF_OTHERS = "hetseq/sagemaker/ranks.py"
# name -> what it does
TRUSTING = {
    r"(^|\.)(TCPStore|FileStore|HashStore|PrefixStore)$": "anybody reads and writes its keys",
    r"(^|\.)init_process_group$": "listens on every interface",
    r"(^|\.)distributed\.(elastic|rpc|checkpoint)(\.|$)": "unpickles what is on its store, its wire or its disk",
    r"^multiprocessing\.(managers|shared_memory\.ShareableList|Manager|Queue|SimpleQueue|JoinableQueue|Pool|pool)": (
        "unpickles what it receives"
    ),
    r"^multiprocessing\.connection\.(Client|Listener)$": "unpickles what it receives",
    r"^torch\.(jit\.load|package(\.|$)|hub(\.|$)|multiprocessing(\.|$))": "runs or unpickles what it loads",
    r"^(xmlrpc|socketserver|http\.server|asyncio\.start_server)(\.|$)": "a server of its own",
    r"^socket\.(gethostbyname|gethostbyname_ex|gethostbyaddr|getfqdn|create_server)$": (
        "asks a name server for as long as that likes, or knows no IPv6"
    ),
    r"^yaml\.C?(Unsafe|Full)?Loader$": "makes objects of any class",
    r"(^|\.)(set_default_tensor_type|load_state_dict_from_url)$": "loads from the network",
}


def trusting(tree: ast.AST) -> Iterator[str]:
    """Names in TRUSTING, and `recv()` without a size, which is that of a pipe and unpickles."""
    for node, name in _names(tree):
        for pattern, why in TRUSTING.items():
            if re.search(pattern, name):
                yield f"{node.lineno}: {name} ({why})"
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_call and node.func.attr == "recv" and not node.args and not node.keywords:
            yield f"{node.lineno}: recv() (unpickles: recv_bytes)"


def test_nothing_unpickles_or_listens_by_the_way() -> None:
    assert breaches(trusting, allowed=(READER_FOR_OTHERS, GROUP_OF_OTHERS), folders=FOLDERS) == []


def test_what_reads_for_torchs_checkpoints_never_lets_them_read_or_load() -> None:
    names = {name for _, name in _names(_tree(ROOT / READER_FOR_OTHERS)) if "distributed.checkpoint" in name}
    assert "torch.distributed.checkpoint.StorageReader" in names  # the twin: it is seen what is used
    assert not [name for name in names if re.search(r"FileSystemReader|\.(async_)?load\w*$|pickle", name)]


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.TCPStore('h', 1)",
        "from torch.distributed import FileStore",
        "from torch import distributed\ndistributed.init_process_group('gloo')",
        "from torch.distributed.elastic.rendezvous import dynamic_rendezvous",
        "import torch.distributed.checkpoint as dcp",
        "message = channel.recv()",
        "import multiprocessing\nmultiprocessing.Queue()",
        "from multiprocessing import connection\nconnection.Listener(('', 1))",
        "from multiprocessing.connection import Client",
        "from multiprocessing.managers import BaseManager",
        "import torch\ntorch.jit.load(path)",
        "import socket\nsocket.gethostbyname(name)",
        "import http.server",
        "import yaml\nyaml.compose(text, Loader=yaml.Loader)",
    ],
)
def test_what_would_is_seen(source: str) -> None:
    assert list(trusting(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "from multiprocessing.connection import Connection, wait",
        "import multiprocessing\nmultiprocessing.get_context('forkserver').Process(target=f)",
        "channel.recv_bytes()",
        "connection.recv(4096)",
        "import socket\nsocket.getaddrinfo(host, port)",
        "import yaml\nyaml.compose(text, Loader=yaml.SafeLoader)",
        "import torch.distributed as dist\nclass Ours(dist.Store): pass",
    ],
)
def test_their_harmless_relatives_are_not(source: str) -> None:
    assert list(trusting(ast.parse(source))) == []
