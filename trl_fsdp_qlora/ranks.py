"""All ranks at one place, or an error that says which of them did not come.

A collective that one rank enters alone hangs until the process group's time-out, without a word. Calls that users make
(`trainer.save_model()`) are therefore preceded by a meeting over the store that the ranks already share.
"""

import atexit
import contextlib
import itertools
import math
import time
import warnings

import torch.distributed as dist

HINT_AFTER = 30.0  # seconds


class Ranks:
    """Meetings of all ranks of the default process group; at one rank every method returns at once.

    Make it on all ranks, in the same order: meetings are counted.

    Args:
        timeout: seconds to wait for a rank that neither comes nor ends.
    """

    _made = itertools.count()

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.size > 1 else 0
        self._prefix = f"trl_fsdp_qlora/ranks/{next(self._made)}"
        self._meetings = 0
        if self.size > 1:
            self._store = dist.distributed_c10d._get_default_store()
            atexit.register(self._leave)

    def meet(self, what: str) -> None:
        """Return once every rank has called `meet(what)`.

        Raises:
            RuntimeError: if a rank has ended, makes another call, or does not come within `timeout`.
        """
        if self.size == 1:
            return
        self._meetings += 1
        self._call = what
        with self._store_explained():
            self._store.set(self._key("here", self.rank), what)
            self._wait_for({rank: self._key("here", rank) for rank in range(self.size)}, hint_after=HINT_AFTER)
            calls = {rank: self._store.get(self._key("here", rank)).decode() for rank in range(self.size)}
            self._part("met")
        if len(set(calls.values())) > 1:
            listed = "; ".join(f"rank {rank}: {call}" for rank, call in calls.items())
            raise RuntimeError(f"Ranks make different calls ({listed}). {_hint(what)}")

    def hear(self, value: str) -> str:
        """What rank 0 passes as `value`, on every rank. Call it after `meet`, on all ranks."""
        if self.size == 1:
            return value
        key = self._key("said", 0)
        with self._store_explained():
            if self.rank == 0:
                self._store.set(key, value)
            else:
                self._wait_for({0: key})
                value = self._store.get(key).decode()
            self._part("heard")
        return value

    @contextlib.contextmanager
    def _store_explained(self):
        try:
            yield
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"Rank {self.rank} is in {self._call}, but rank 0, which holds the store, has ended. {_hint(self._call)}"
            ) from error

    def _part(self, kind: str) -> None:
        """Rank 0 goes last: the store may be in its process, which may end next, while others still ask."""
        self._store.set(self._key(kind, self.rank), "")
        if self.rank == 0:
            self._wait_for({rank: self._key(kind, rank) for rank in range(self.size)})

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._prefix}/{self._meetings}/{kind}/{rank}"

    def _leave(self) -> None:
        with contextlib.suppress(Exception):  # the store may have gone with its host
            self._store.set(f"{self._prefix}/left/{self.rank}", "")

    def _wait_for(self, keys: dict[int, str], hint_after: float = math.inf) -> None:
        what, start, pause, hinted = self._call, time.monotonic(), 0.001, False
        while not self._store.check(list(keys.values())):
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            ended = [rank for rank in missing if self._store.check([f"{self._prefix}/left/{rank}"])]
            # A rank that came just before it ended is not missing.
            if ended and not self._store.check([keys[ended[0]]]):
                raise RuntimeError(f"Rank {self.rank} is in {what}, but rank {_listed(ended)} has ended. {_hint(what)}")
            waited = time.monotonic() - start
            if missing and waited > self.timeout:
                raise RuntimeError(
                    f"Rank {self.rank} is in {what}, and rank {_listed(missing)} did not come within "
                    f"{self.timeout:.0f} s (`ddp_timeout`). {_hint(what)}"
                )
            if missing and waited > hint_after and not hinted:
                hinted = True
                warnings.warn(
                    f"Rank {self.rank} is in {what} and has waited {hint_after:.0f} s for rank {_listed(missing)}. {_hint(what)}",
                    stacklevel=4,
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _hint(what: str) -> str:
    return (
        f"Every rank must call {what}, because every rank holds a part of the adapter; rank 0 alone writes files anyway. "
        "Remove the `if rank == 0` or `is_main_process` around the call."
    )
