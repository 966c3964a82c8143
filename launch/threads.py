"""Calls that block, in threads that hold up nobody's end.

Consumes    a call
Produces    its end, as a future
Waits for   nothing: asyncio's own threads are joined when a loop ends, however long they still block; these are not
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


def in_thread(call: Callable[[], Any], *, stays: bool = False) -> asyncio.Future[Any]:
    """What it returns or raises; nobody need wait for it.

    `stays`: the thread remains, since the kernel ends processes such as Ray's with the thread that started them.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def tell(value: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(tell, value, error)
        if stays:
            threading.Event().wait()

    threading.Thread(target=work, daemon=True).start()
    return future
