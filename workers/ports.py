"""A port that the kernel gives to nobody else, and that rank 0 of a generation may still bind."""

from __future__ import annotations

import socket


class ReservedPort:
    """Bound here and never listening; one for each generation, the older one is given back."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._generation: int | None = None

    def reserve(self, generation: int, host: str) -> int:
        if self._socket is None or self._generation != generation:
            self.free()
            self._generation = generation
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, 0))
        port: int = self._socket.getsockname()[1]
        return port

    def free(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
