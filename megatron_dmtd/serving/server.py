"""The server around the application, mainly its shutdown.

At a signal the port is closed and running requests may finish. When the grace period is over, each of those left gets its error
(an event in a stream, status 503 otherwise), and the log one line. A client that does not read then is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn
from fastapi import FastAPI

from megatron_dmtd.serving.worker import Worker

_log = logging.getLogger(__name__)

#: Seconds for errors to reach their clients.
_DELIVERY_S = 2.0


class Server(uvicorn.Server):
    """Serves an application until told to end."""

    def __init__(self, app: FastAPI, worker: Worker, *, grace_s: float, access_log: bool = False) -> None:
        """`grace_s`: for requests that run when the server is told to end."""
        level = "info" if access_log else "warning"
        super().__init__(uvicorn.Config(app, log_level=level, access_log=access_log))
        self._worker, self._grace_s = worker, grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        ending = asyncio.ensure_future(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            if self.force_exit:
                await self._disconnect()

    async def _end_requests(self) -> None:
        """End what runs after the grace period."""
        await asyncio.sleep(self._grace_s)
        if num_running := len(self.server_state.tasks):
            _log.warning("%d requests outlast the grace period of %g s and end with an error", num_running, self._grace_s)
        await asyncio.to_thread(self._worker.close)
        await asyncio.sleep(_DELIVERY_S)
        await self._disconnect()

    async def _disconnect(self) -> None:
        """Close connections whose clients do not read, or that are not worth waiting for. Their requests end by themselves."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for _ in range(100):
            if not self.server_state.tasks:
                return
            await asyncio.sleep(0.01)
