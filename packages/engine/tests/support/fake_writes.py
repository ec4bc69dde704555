"""A stand-in for Mooncake's transfer engine inside one process: registered memory, and memmove."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable


class FakeEngine:
    """What `pd.remote_writes.WriteEngine` says, between the engines of this process."""

    engines: dict[str, FakeEngine] = {}  # noqa: RUF012 - the network

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.ever: list[int] = []
        """Every address that was registered, oldest first."""
        self.taken_back: list[int] = []
        self.written = 0
        self.may_write = threading.Event()
        self.may_write.set()
        self.entered = threading.Event()
        self.fails: Callable[[int], bool] = lambda number: False
        """Whether write `number` of this engine does not work."""
        self.spoils: Callable[[int], bool] = lambda number: False
        """Whether somebody else has written there, too, before decode looks."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int:
        if protocol == "rdma":
            return -1  # there is no device
        self._port = 9000 + len(self.engines)
        self.engines[f"{host}:{self._port}"] = self
        return 0

    def get_rpc_port(self) -> int:
        return self._port

    def register_memory(self, address: int, size: int, /) -> int:
        if address in self.registered:
            return -1
        self.registered[address] = size
        self.ever.append(address)
        return 0

    def unregister_memory(self, address: int, /) -> int:
        self.taken_back.append(address)
        return 0 if self.registered.pop(address, None) is not None else -1

    def transfer_sync_write(self, target: str, address: int, peer: int, size: int, /) -> int:
        self.entered.set()
        assert self.may_write.wait(60)
        number, self.written = self.written, self.written + 1
        if self.fails(number) or not self._holds(self, address, size):
            return -1
        if not self._holds(self.engines[target], peer, size):
            return -1
        ctypes.memmove(peer, address, size)
        if self.spoils(number):
            ctypes.memset(peer, 255, 1)
        return 0

    @staticmethod
    def _holds(engine: FakeEngine, address: int, size: int) -> bool:
        return any(a <= address and address + size <= a + n for a, n in engine.registered.items())
