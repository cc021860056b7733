"""What schedulers of a cell share: a lock with an epoch, and the leader's log. On Redis or Valkey.

Theory of operation
===================
Each operation is one script or one command, so it is atomic. The epoch rises with each new owner of the lock. An entry
is appended only in the current epoch, and not while the lock is another's: an owner that lost the lock cannot write any
more, whatever it believes. It is appended only to the entry before it: so a store that was restarted between two
commands, with older data, is detected. No decision waits for any of this.

What no scheduler writes mends itself. A lock that never expires, or only after more than `MAX_LOCK_MS`, is given an
end by who stands by. An epoch that is no number, or a jump that cannot be, counts as lost: its leader, or the next one,
writes it again.

All keys begin with `ta:{CELL}:`, so that they are in one slot of a cluster. Anybody who can write there decides what a
new scheduler believes: keep it as safe as the schedulers themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from thunderagent.errors import FencedError, StoreError
from thunderagent.redis_failover import Answer, asked_anew, in_words
from thunderagent.scale.leader.store import Seen, heeds_cancellation, seen_of
from thunderagent.scale.messages import MAX_EPOCH
from thunderagent.scale.scheduler.gateways import EPOCH_JUMP

ANSWER_LIMIT_S = 1.0
"""A store that takes longer counts as away."""

ENTRIES_COUNT = 200
"""Entries read at once."""

MAX_LOCK_MS = 600_000
"""No scheduler's lock lasts longer."""

REPLICATED_LIMIT_MS = 100
"""How long a new epoch waits for one replica of the store to have it, if there are any."""

BELIEVED = f"""
local function believed(text, known)
  local epoch = tonumber(text or '0')
  local is_one = epoch and epoch >= 0 and epoch < {MAX_EPOCH} and epoch == math.floor(epoch)
  if not is_one or (known > 0 and epoch - known > {EPOCH_JUMP}) then return -1 end
  return epoch
end
"""
"""The epoch in the store, or -1 if it is beyond reason for who knows of one."""

TAKE = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= '' and owner ~= ARGV[3] then return 0 end
local least = tonumber(ARGV[4])
local epoch = math.max(believed(redis.call('GET', KEYS[2]), least), least) + 1
redis.call('SET', KEYS[2], epoch)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return epoch
"""

RENEW = """
local owner = redis.call('GET', KEYS[1])
local known = redis.call('GET', KEYS[2])
local mine = tonumber(ARGV[3])
local epoch = believed(known, mine)
if owner == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  if epoch < mine then redis.call('SET', KEYS[2], mine) end
  return epoch < mine and 2 or 1
end
if not owner and epoch <= mine then
  redis.call('SET', KEYS[2], mine)
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return epoch < mine and 2 or 1
end
return 0
"""

APPEND = """
local epoch, owner = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[3])
local mine = tonumber(ARGV[1])
local known = believed(epoch, mine)
if not epoch or known < mine then return 'lost' end
if known > mine then return 'fenced' end
if owner and owner ~= '' and owner ~= ARGV[3] then return 'fenced' end
if ARGV[4] ~= '' then
  local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
  if not last or last[1] ~= ARGV[4] then return 'lost' end
end
return redis.call('XADD', KEYS[2], '*', 'e', ARGV[2])
"""

LIMIT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local lasts_ms = redis.call('PTTL', KEYS[1])
if lasts_ms ~= -1 and lasts_ms <= tonumber(ARGV[3]) then return 0 end
redis.call('PEXPIRE', KEYS[1], lasts_ms == -1 and ARGV[2] or ARGV[3])
return 1
"""
"""A scheduler's lock has an end, unless it was given up."""

GIVE_UP = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('SET', KEYS[1], '') end
return 1
"""


class RedisStore:
    """A store at `redis://HOST:PORT/DATABASE`, or `rediss://`, or `unix://`."""

    def __init__(self, url: str, cell: str, lock_s: float) -> None:
        """Connect at the first use. A lock lasts `lock_s` without a renewal."""
        self._client = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=ANSWER_LIMIT_S,
            socket_connect_timeout=ANSWER_LIMIT_S,
            protocol=2,
            retry=Retry(NoBackoff(), 0),  # callers retry themselves, and must not sleep through a store's return
        )
        prefix = f"ta:{{{cell}}}"
        self._lock, self._epoch, self._log = f"{prefix}:leader", f"{prefix}:epoch", f"{prefix}:log"
        self._standby, self._probe = f"{prefix}:standby", f"{prefix}:probe"
        self._lock_ms = int(lock_s * 1000)
        self._last = ""
        """The last written entry; empty if unknown."""
        self._refuses = False
        """Whether the last write failed."""
        script = self._client.register_script
        self._take, self._renew, self._append = (
            script(BELIEVED + TAKE),
            script(BELIEVED + RENEW),
            script(BELIEVED + APPEND),
        )
        self._give_up, self._limit = script(GIVE_UP), script(LIMIT)

    async def look(self, after: str) -> Seen:
        """Return the current state; see `Store`, also for the other methods.

        A store that refused the last write does not answer until it takes one: whoever only reads would believe in a
        server that nobody writes to any more.
        """
        if self._refuses:
            await self._write(lambda: self._client.set(self._probe, b"", px=self._lock_ms))

        async def read() -> Seen:
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.mget(self._lock, self._epoch)
                pipeline.pttl(self._lock)
                pipeline.xread({self._log: after}, count=ENTRIES_COUNT)
                (owner, epoch), lasts_ms, found = await pipeline.execute()
            entries = [each for _, of_log in found or () for each in of_log]
            seen = seen_of(owner, epoch, entries, has_more=len(entries) == ENTRIES_COUNT)
            if owner and not 0 <= lasts_ms <= MAX_LOCK_MS:
                limits_ms = [self._lock_ms, MAX_LOCK_MS]
                if await self._limit(keys=[self._lock], args=[owner, *limits_ms]):
                    limit_s = limits_ms[lasts_ms != -1] / 1000
                    seen = seen._replace(damage=f"the lock of {seen.owner!r} had no end: it has {limit_s:g} s now")
            return seen

        async with _errors():
            return await asked_anew(self._client, read)

    async def take(self, owner: str, expected: str, least_epoch: int) -> int:
        """Take the lock."""

        async def take() -> int:
            keys = [self._lock, self._epoch]
            return int(await self._take(keys=keys, args=[owner, self._lock_ms, expected, least_epoch]))

        epoch = await self._write(take)
        if epoch:
            await self._replicated()
        return epoch

    async def _replicated(self) -> None:
        """Wait briefly for a replica to have what was written, if there is one; if that fails, it is still written."""
        with contextlib.suppress(StoreError):
            async with _errors():
                if (await self._client.info("replication")).get("connected_slaves"):
                    await self._client.wait(1, REPLICATED_LIMIT_MS)

    async def renew(self, owner: str, epoch: int) -> int:
        """Renew the lock."""

        async def renew() -> int:
            return int(await self._renew(keys=[self._lock, self._epoch], args=[owner, self._lock_ms, epoch]))

        return await self._write(renew)

    async def append(self, owner: str, epoch: int, data: bytes) -> str:
        """Write an entry. Only the leader writes: the log ends with the last written entry."""
        last, self._last = self._last, ""

        async def append() -> str:
            keys = [self._epoch, self._log, self._lock]
            where: bytes = await self._append(keys=keys, args=[epoch, data, owner, last])
            return where.decode()

        where = await self._write(append)
        if where == "fenced":
            raise FencedError(f"epoch {epoch} is over")
        if where == "lost":
            raise StoreError("the store lost its epoch, or what was written last")
        self._last = where
        return where

    async def position(self) -> str:
        """Return the position of the last entry."""

        async def read() -> str:
            if not await self._client.exists(self._log):
                return ""
            where: bytes = (await self._client.xinfo_stream(self._log))["last-generated-id"]
            return where.decode()

        async with _errors():
            return await asked_anew(self._client, read)

    async def trim(self, where: str) -> None:
        """Cut off what is before an entry."""
        await self._write(lambda: self._client.xtrim(self._log, minid=where, approximate=False))

    async def give_up(self, owner: str) -> None:
        """Leave the lock empty."""
        await self._write(lambda: self._give_up(keys=[self._lock], args=[owner]))

    async def stand_by(self, owner: str) -> None:
        """Announce a standby for as long as a lock lasts."""
        await self._write(lambda: self._client.set(self._standby, owner, px=self._lock_ms))

    async def _write(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Write, on a new connection if the server of this one takes no writes any more. Raises `StoreError`."""
        self._refuses = True
        async with _errors():
            answer = await asked_anew(self._client, ask)
        self._refuses = False
        return answer

    async def has_standby(self, owner: str) -> bool:
        """Return whether another standby was announced."""
        async with _errors():
            return await self._client.get(self._standby) not in (None, owner.encode())

    async def warnings(self) -> list[str]:
        """Return settings that may lose data, as far as they can be read."""
        async with _errors():
            try:
                found: dict[str, Any] = {
                    **await self._client.info("persistence"),
                    **await self._client.info("memory"),
                }
            except (ResponseError, NoPermissionError):
                return []
            told = []
            if not int(found.get("aof_enabled", 1)):
                told.append("appendonly is off: a store that is started again begins with nothing, or with an old dump")
            policy = str(found.get("maxmemory_policy", "noeviction"))
            if int(found.get("maxmemory", 0)) and policy.startswith("allkeys"):
                told.append(f"maxmemory-policy is {policy}: the log may be thrown away; set it to noeviction")
            return told

    async def close(self) -> None:
        """Close its connections."""
        with contextlib.suppress(RedisError, OSError):
            await self._client.aclose()


@contextlib.asynccontextmanager
async def _errors() -> AsyncIterator[None]:
    """Convert the client's errors, and limit its time.

    A client that writes to a connection whose end uvloop already knows gets a `RuntimeError` from it.
    """
    try:
        async with asyncio.timeout(2 * ANSWER_LIMIT_S):
            with heeds_cancellation():
                yield
    except (RedisError, OSError, TimeoutError, RuntimeError) as error:
        raise StoreError(f"the store refused a command: {in_words(error)}") from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # of the client or of ours, on strange data
        raise StoreError(f"the store does not answer as Redis does: {error}") from error
