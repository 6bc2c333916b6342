"""Main of a rank that has an invitation; it comes on standard input, where no other user of the machine reads it."""

from __future__ import annotations

import sys

from quire.executor.messages import ToWorker
from quire.executor.worker_process import serve
from quire.foundation.child import leave
from quire.foundation.remote import Invitation, RemoteParent


def main(arguments: list[str]) -> int:
    parent: RemoteParent[ToWorker] = RemoteParent(
        Invitation.read(sys.stdin.read().strip()), ToWorker, int(arguments[0])
    )
    return serve(parent)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
