"""A process on the host `ctl` between two others: it hands on what they send, later, or cuts them off."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cluster.hosts import Hosts

PORT = 4712

PROGRAM = """
import asyncio, signal, socket, struct, sys
host, port, delay, own = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
open_ones = set()

async def carry(reader, writer):
    while data := await reader.read(65536):
        await asyncio.sleep(delay)
        writer.write(data)
    writer.close()

async def serve(reader, writer):
    there = await asyncio.open_connection(host, port)
    open_ones.update((writer, there[1]))
    await asyncio.gather(carry(reader, there[1]), carry(there[0], writer), return_exceptions=True)

def reset():
    for writer in open_ones:
        if (one := writer.get_extra_info("socket")) is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close is a reset
        writer.transport.abort()
    open_ones.clear()
    print("reset", flush=True)

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, reset)
    async with await asyncio.start_server(serve, "0.0.0.0", own) as server:
        print("ready", flush=True)
        await server.serve_forever()

asyncio.run(main())
"""


class Relay:
    """To `address` (HOST:PORT), holding every byte for so many `seconds`. A context manager."""

    def __init__(self, hosts: Hosts, address: str, seconds: float = 0):
        self.address = f"ctl:{PORT}"
        host, port = address.split(":")
        self._command = hosts.on("ctl", sys.executable, "-c", PROGRAM, hosts.address(host), port, seconds, PORT)

    def __enter__(self) -> Relay:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, cwd=Path("/"))
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def reset(self) -> None:
        """Cut off all who are connected; they may connect again."""
        self._process.send_signal(10)
        assert self._process.stdout.readline() == "reset\n"
