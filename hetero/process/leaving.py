"""How the processes of hetero end: not the way the interpreter does it, which may take for ever."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


def open_standard_streams() -> None:
    """Open what was closed of standard input, output and error: as /dev/null, at their own numbers.

    A daemon or a scheduler may start a process without them. A file or socket opened later would get their numbers, and
    what the process or its children print would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


EXIT_HANDLERS_S = {True: 5.0, False: 1.0}
"""How long handlers that libraries and the job registered with `atexit` may take, after success and after a failure.

After a failure peers wait to hear of it, and a handler may itself wait for a peer that is gone.
"""


def leave(code: int) -> NoReturn:
    """End this process: exit handlers, then at once.

    Not by sys.exit. The interpreter stops threads where they are and tears objects down after that: a call of gRPC
    whose thread held its lock at that moment waits for it for ever in its destructor; clients of tf.data service can
    delay the end by 20 s; and tensorflow-io aborts in it once it has read from S3.

    Args:
        code: The exit code.
    """

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads it any more
                stream.flush()

    def give_up() -> None:
        flush()
        os._exit(code)

    watchdog = threading.Timer(EXIT_HANDLERS_S[code == 0], give_up)
    watchdog.daemon = True
    try:
        watchdog.start()
    except RuntimeError:  # no memory for a thread: then the handlers cannot be bounded
        give_up()
    atexit._run_exitfuncs()  # noqa: SLF001  there is no public way to run them without ending the interpreter
    flush()
    os._exit(code)
