"""An agent's part in copies between nodes: it makes memory checkpoints, gives parts of snapshots, and makes its own whole from others'.

Invariants: at most one fetch is under way, and none when ranks are launched; whatever comes from another node is verified before it counts;
a copy made by a generation that does not train any more is thrown away.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from workers.checkpoint import peers
from workers.checkpoint.peers import OWN, SHARED
from workers.checkpoint.room import free_bytes
from workers.checkpoint.slots import Header
from workers.checkpoint.tree import StateError
from workers.messages import Fetch, Offer

RETURN_S = 30.0  # an agent that cannot be reached is asked again for this long
AGAIN_S = 0.5

T = TypeVar("T")


class Peer(Protocol):
    """Another agent, or this one. Raises ConnectionError, StateError, OSError."""

    async def offer(self, rank: int, step: int, part: str) -> Offer | None: ...
    async def give(self, name: str, at: int, size: int) -> Any: ...


@dataclass
class Exchange:
    """``trains(generation)`` tells whether that generation is the one that runs here; ``fetched(ranks, step)`` is called after a fetch, its
    step None where it failed."""

    shm: Path
    index: int
    nodes: int
    ranks: Sequence[int]  # of this node
    peer: Callable[[int], Peer]
    trains: Callable[[int], bool]
    fetched: Callable[[Sequence[int], int | None], Awaitable[None]]
    unfetched: dict[int, str] = field(default_factory=dict)  # step -> why it cannot be made whole
    _fetch: asyncio.Task[None] | None = None
    _fetching: int | None = None

    # what other agents ask for

    async def offer(self, rank: int, step: int, part: str) -> Offer | None:
        return await asyncio.to_thread(peers.offer, self.shm, self.ranks, rank, step, part)

    async def give(self, name: str, at: int, size: int) -> Any:
        return await asyncio.to_thread(peers.read, self.shm, name, at, size)

    # memory checkpoints

    async def copy(self, step: int, generation: int, complete: int | None) -> str | None:
        """Copy this node's pinned snapshots of ``step``; ``complete`` is the newest memory checkpoint that all nodes have. None when it
        is done, else why not."""
        await asyncio.to_thread(self.drop, {step, complete})
        try:
            whole, own = peers.sizes(self.shm, self.ranks, step)
            free = await asyncio.to_thread(free_bytes, self.shm)
            if free < 2 * whole + own:  # as much must be left as a third slot or a staged checkpoint takes
                return f"a copy takes {whole + own} bytes and must leave {whole} free, {free} are; give the node more memory"
            made = await asyncio.to_thread(peers.copy_slots, self.shm, self.ranks, step, lambda: self.trains(generation))
        except (StateError, OSError) as error:
            self.drop({complete})
            return str(error)
        return self._publish(made, generation, {complete})

    async def guard(self, step: int, generation: int, complete: int | None) -> str | None:
        """Take over what is their own of the ranks of the node before this one, from its copies of ``step``."""
        ward = (self.index - 1) % self.nodes
        made = []
        try:
            for rank in range(ward * len(self.ranks), (ward + 1) * len(self.ranks)):
                made.append(await self._guard(self.peer(ward), rank, step))
        except (StateError, OSError) as error:
            self.drop({complete})
            return str(error)
        return self._publish(made, generation, {complete})

    async def _guard(self, peer: Peer, rank: int, step: int) -> Path:
        given = await peer.offer(rank, step, OWN)
        if given is None:
            raise StateError(f"rank {rank} has no sound copy of step {step}")
        header = peers.header_of(given)
        path = peers.copy_path(self.shm, rank, step)
        await asyncio.to_thread(peers.begin, path, header, whole=False)
        await self._move(peer, given, path, header, OWN)
        if not await asyncio.to_thread(peers.finish, path, header, [OWN]):
            raise StateError(f"what is rank {rank}'s own of step {step} was damaged on the way")
        return path

    def _publish(self, made: Sequence[Path], generation: int, keep: set[int | None]) -> str | None:
        if not self.trains(generation):
            self.drop(keep)
            return f"generation {generation} has ended"
        peers.publish(made)
        return None

    def drop(self, keep: set[int | None]) -> None:
        """Remove all memory checkpoints but these."""
        peers.drop_copies(self.shm, lambda step: step in keep)

    def drop_newer(self, step: int) -> None:
        """A generation begins from ``step``: what was newer will be made anew."""
        peers.drop_copies(self.shm, lambda known: known <= step)

    # restoring

    async def fetch(self, step: int, fetches: Sequence[Fetch]) -> None:
        """Begin to make the slots of ``step`` whole, unless that is under way or has failed; ``fetched`` or ``unfetched`` tells the end."""
        if step == self._fetching or step in self.unfetched:
            return
        mine = [f for f in fetches if f.rank in self.ranks]
        if mine:
            await self.end_fetch()
            self._fetching = step
            self._fetch = asyncio.create_task(self._fetch_all(step, mine))

    async def end_fetch(self) -> None:
        """Returns when no fetch is under way any more."""
        if self._fetch is not None:
            self._fetch.cancel()
            await asyncio.wait({self._fetch})
        self._fetch, self._fetching = None, None

    async def _fetch_all(self, step: int, fetches: Sequence[Fetch]) -> None:
        try:
            for fetch in fetches:
                await self._make_whole(step, fetch)
        except (StateError, OSError) as error:
            self.unfetched[step] = str(error)
        except Exception as error:
            self.unfetched[step] = f"{type(error).__name__}: {error}"
        await self.fetched([f.rank for f in fetches], None if step in self.unfetched else step)

    async def _make_whole(self, step: int, fetch: Fetch) -> None:
        slot = await asyncio.to_thread(peers.repairable, self.shm, fetch.rank, step)
        if slot is None:
            slot = await self._from_any(fetch.own, lambda node: self._take_own(node, fetch.rank, step))
        path, header = slot
        await self._from_any(fetch.shared, lambda node: self._take_shared(node, fetch.rank, step, path, header))

    async def _take_own(self, node: int, rank: int, step: int) -> tuple[Path, Header]:
        peer = self._peer(node)
        given = await peer.offer(rank, step, OWN)
        if given is None:
            raise StateError(f"node {node} has no sound copy of what is rank {rank}'s own")
        path, header = await _to_end(peers.take_slot, self.shm, rank, peers.header_of(given))
        await self._move(peer, given, path, header, OWN)
        if not await _to_end(peers.sound, path, header, OWN):
            raise StateError(f"what is rank {rank}'s own was damaged on the way from node {node}")
        return path, header

    async def _take_shared(self, node: int, rank: int, step: int, path: Path, header: Header) -> None:
        peer = self._peer(node)
        given = await peer.offer(node * len(self.ranks) + rank % len(self.ranks), step, SHARED)
        if given is None:
            raise StateError(f"node {node} has no sound replica for rank {rank}")
        await self._move(peer, given, path, header, SHARED)
        if not await _to_end(peers.finish, path, header, [OWN, SHARED]):
            raise StateError(f"what node {node} gave for rank {rank} does not match its checksum")

    async def _move(self, peer: Peer, given: Offer, path: Path, header: Header, part: str) -> None:
        """The next piece comes while one is written."""
        wanted = peers.pieces(peers.header_of(given), header, part)

        def ask(at: int) -> asyncio.Future[Any]:
            source, _, size = wanted[at]
            return asyncio.ensure_future(peer.give(given.name, source, size))

        coming = ask(0)
        try:
            for at, (_, target, _) in enumerate(wanted):
                data = await coming
                if at + 1 < len(wanted):
                    coming = ask(at + 1)
                await _to_end(peers.put, path, target, data)
        finally:
            coming.cancel()

    def _peer(self, node: int) -> Peer:
        return self if node == self.index else self.peer(node)

    async def _from_any(self, nodes: Sequence[int], take: Callable[[int], Awaitable[T]]) -> T:
        """What the first of ``nodes`` gives that can; those that cannot be reached are asked again. Raises StateError with all reasons."""
        problems: dict[int, str] = {}
        until = time.monotonic() + RETURN_S
        while True:
            for node in nodes:
                if node not in problems:
                    try:
                        return await take(node)
                    except ConnectionError as error:
                        if time.monotonic() > until:
                            problems[node] = str(error)
                    except (StateError, OSError) as error:
                        problems[node] = str(error)
            if len(problems) == len(nodes):
                raise StateError("; ".join(problems.values()) or "no node has it")
            await asyncio.sleep(AGAIN_S)


async def _to_end(work: Callable[..., T], *args: Any) -> T:
    """In a thread; a cancelled caller still waits for it, so that nothing is written later."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(BaseException):
            await asyncio.wait({task})
        raise
