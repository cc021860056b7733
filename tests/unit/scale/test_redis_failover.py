"""What a Redis answers that is not the one to ask: its connections are dropped, and it is said in words."""

from __future__ import annotations

import pytest

exceptions = pytest.importorskip("redis.exceptions", reason="needs the extra `scale`")

from thunderagent.redis_failover import asked_anew, in_words  # noqa: E402 - needs it


class Client:
    """A client whose server is another one after its connections were dropped."""

    def __init__(self, *answers: BaseException | str) -> None:
        self.connection_pool = self
        self.drops_count = 0
        self._answers = iter(answers)

    async def disconnect(self, *, inuse_connections: bool) -> None:
        assert not inuse_connections
        self.drops_count += 1

    async def ask(self) -> str:
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer


ELSEWHERE = [
    exceptions.ReadOnlyError("You can't write against a read only replica."),
    exceptions.MovedError("5718 10.0.0.2:6379"),
    exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
    exceptions.MasterDownError("Link with MASTER is down"),
    exceptions.ClusterDownError("Hash slot not served"),
]


@pytest.mark.parametrize("refusal", ELSEWHERE, ids=lambda each: type(each).__name__)
async def test_a_refusal_of_the_wrong_server_is_asked_again_on_a_new_connection(refusal: Exception) -> None:
    client = Client(refusal, "done")
    assert await asked_anew(client, client.ask) == "done"
    assert client.drops_count == 1
    client = Client(refusal, refusal)
    with pytest.raises(type(refusal)):
        await asked_anew(client, client.ask)


async def test_any_other_refusal_is_one() -> None:
    client = Client(exceptions.ResponseError("OOM command not allowed"), "never")
    with pytest.raises(exceptions.ResponseError):
        await asked_anew(client, client.ask)
    assert client.drops_count == 0


def test_refusals_are_said_in_words() -> None:
    said = [in_words(each) for each in ELSEWHERE]
    for words, expected in zip(
        said, ("read-only", "10.0.0.2:6379", "loading", "lost its primary", "down"), strict=True
    ):
        assert expected in words
    assert in_words(OSError()) == "OSError"
