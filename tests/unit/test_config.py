"""The configuration: the sources of its values, and its refusals."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import NoReturn

import pytest
from pydantic import ValidationError

from thunderagent.config import ServeConfig, unknown_variables
from thunderagent.errors import ConfigurationError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the machine's own settings."""
    for name in ServeConfig.model_fields:
        monkeypatch.delenv(f"THUNDERAGENT_{name.upper()}", raising=False)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "thunderagent.toml"
    path.write_text(text)
    return path


def test_command_line_comes_before_environment_before_file_before_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four values of one kind, each from the first source that has it."""
    file = toml(tmp_path, "tick_s = 1.5\ngrace_s = 2.5\npoll_interval_s = 3.5\n")
    monkeypatch.setenv("THUNDERAGENT_TICK_S", "10")
    monkeypatch.setenv("THUNDERAGENT_GRACE_S", "20")
    config = ServeConfig.load(file, tick_s="100")
    assert (config.tick_s, config.grace_s, config.poll_interval_s) == (100.0, 20.0, 3.5)
    assert config.poll_deadline_s == ServeConfig.model_fields["poll_deadline_s"].default


def test_configuration_does_not_remember_the_file_of_another(tmp_path: Path) -> None:
    """The file belongs to one load."""
    assert ServeConfig.load(toml(tmp_path, "port = 9000\n")).port == 9000
    assert ServeConfig.load().port == 8300


@pytest.mark.parametrize(
    "given", ["http://a:1,http://b:2/", ["http://a:1", " http://b:2 "], " http://a:1 , http://b:2,"]
)
def test_backends_are_urls_separated_by_commas_or_a_list(given: object) -> None:
    """Spaces, a comma at the end, and slashes at the end are dropped."""
    assert ServeConfig.load(backends=given).backends == ("http://a:1", "http://b:2")


def test_lists_come_from_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TOML array and table, a variable with commas, repeated options."""
    file = toml(tmp_path, 'backends = ["http://a"]\n[policy_args]\nn = 6\n')
    config = ServeConfig.load(file)
    assert (config.backends, config.policy_args) == (("http://a",), {"n": "6"})
    monkeypatch.setenv("THUNDERAGENT_POLICY_ARGS", "n=7, tick_s=0.5")
    assert ServeConfig.load(file).policy_args == {"n": "7", "tick_s": "0.5"}
    assert ServeConfig.load(file, policy_args=["n=8"]).policy_args == {"n": "8"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": "70000"}, "port: .*less than or equal to 65535"),
        ({"port": "x"}, "port: .*valid integer"),
        ({"tick_s": "0"}, "tick_s: .*greater than 0"),
        ({"tick_s": "nan"}, "tick_s: "),
        ({"grace_s": "-1"}, "grace_s: .*greater than or equal to 0"),
        ({"capacity_tokens": "0"}, "capacity_tokens: "),
        ({"backends": "localhost:8000"}, "backends: .*'localhost:8000' is not an http or https URL"),
        ({"backends": "http://a:8000/v1"}, "backends: .*name the engine's root, without /v1"),
        ({"backends": "http://a,http://a/"}, "backends: .*http://a is named twice"),
        ({"backends": "http://a:1,http://a:1#dp=2"}, "backends: .*http://a:1 is named twice"),
        ({"backends": "http://a:1#ranks=2"}, "backends: .*after # comes dp=N"),
        ({"backends": "http://a:1#dp=0"}, "backends: .*'0' is not a number of data-parallel ranks"),
        ({"backends": "dns+https://a:1"}, "backends: .*to look up a name, write dns\\+http://NAME:PORT"),
        ({"backends": "dns+http://a:1/path"}, "backends: .*is given as dns\\+http://NAME:PORT"),
        ({"data_parallel_ranks": "some"}, "data_parallel_ranks: .*'some' is not a number"),
        ({"kubernetes_replicas": "app=vllm:8000"}, "kubernetes_replicas: .*is not NAMESPACE/SELECTOR:PORT"),
        ({"kv_events": "tcp://a:1"}, "^kv_events needs an address for each of backends, so 0, not 1; or one for all"),
        (
            {"kv_events": "tcp://{host}:1", "kv_events_replay": "tcp://a:1,tcp://a:2"},
            "^kv_events_replay needs an address for each of kv_events, so 1, not 2$",
        ),
        ({"judge_model": "m", "judge_fail_count": 3}, "^judge_model, judge_fail_count go with judge_url$"),
        ({"judge_api_key": "k"}, "^judge_api_key goes with judge_url$"),
        ({"order": "orbit-judge"}, "^orbit-judge needs judge_url"),
        ({"policy_args": ["priority=orbit-judge"]}, "^orbit-judge needs judge_url"),
        ({"provision_image": "i"}, "^provision_image goes with provision$"),
        ({"provision_min": 2, "provision_command": "c"}, "^provision_command, provision_min go with provision$"),
        ({"backends": 5}, "backends: "),
        ({"policy_args": ["n"]}, "policy_args: .*'n' is not name=value"),
        ({"policy_args": ["=6"]}, "policy_args: .*'=6' is not name=value"),
        ({"backend_type": "tgi"}, "backend_type: .*'vllm'"),
        ({"log_level": "loud"}, "log_level: "),
        ({"no_such_field": 1}, "no_such_field: "),
    ],
)
def test_a_wrong_value_names_its_field(given: dict[str, object], message: str) -> None:
    """The message says what to correct."""
    with pytest.raises(ConfigurationError, match=message):
        ServeConfig.load(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"backends": "dns+http://engines:8000,http://a:1#dp=4,http://[::1]:8000"},
        {"data_parallel_ranks": "auto"},
        {"data_parallel_ranks": 8},
        {"kubernetes_replicas": "inference/app.kubernetes.io/name=vllm,tier in (gpu, big):http"},
        {"kv_events": "tcp://{host}:5557"},
        {"embedded_engines": 0},
        {"judge_every_turns": "5", "judge_model": "", "provision_port": "8000", "provision_image": ""},
        {"judge_url": "replicas", "order": "orbit-judge"},
    ],
)
def test_compatible_options_are_taken(given: dict[str, object]) -> None:
    """Cases are names, ranks, pods; one address of KV events for all; none at all. Defaults go with anything."""
    ServeConfig.load(**given)


def test_every_wrong_value_is_named_at_once() -> None:
    """Users need not correct one after the other."""
    with pytest.raises(ConfigurationError, match=r"port: .*; tick_s: "):
        ServeConfig.load(port="x", tick_s="0")


def test_a_wrong_value_of_the_environment_or_the_file_names_its_field_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source does not matter; an unknown name in the file counts as a typing error."""
    with pytest.raises(
        ConfigurationError, match=r"thunderagent\.toml, line 1: polcy: there is no such key; did you mean policy\?"
    ):
        ServeConfig.load(toml(tmp_path, 'polcy = "cap"\n'))
    monkeypatch.setenv("THUNDERAGENT_PORT", "many")
    with pytest.raises(ConfigurationError, match="THUNDERAGENT_PORT: "):
        ServeConfig.load()


def test_a_file_that_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    """A given name must lead to a file."""
    with pytest.raises(ConfigurationError, match=r"there is no configuration file .*missing"):
        ServeConfig.load(tmp_path / "missing.toml")
    with pytest.raises(ConfigurationError, match=r"thunderagent\.toml: .*line 1"):
        ServeConfig.load(toml(tmp_path, "port == 1\n"))


@pytest.mark.parametrize("name", ["is_file", "open"])
def test_a_file_that_may_not_be_read_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it may not be found, or not be opened: a reload must not end the process."""
    file = toml(tmp_path, "port = 9000\n")

    def refuse(path: Path, *_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(ConfigurationError, match=r"Permission denied: .*thunderagent\.toml"):
        ServeConfig.load(file)


def test_configuration_is_frozen() -> None:
    """It is built once, passed down, and never changed."""
    config = ServeConfig.load()
    with pytest.raises(ValidationError, match="frozen"):
        config.port = 1


def test_every_field_has_a_description_and_every_time_its_unit() -> None:
    """They make up `--help`."""
    for name, field in ServeConfig.model_fields.items():
        assert field.description, name
        unit = "per second" if name.endswith("_per_s") else "in seconds"
        assert not name.endswith("_s") or unit in field.description, name


def test_a_variable_that_is_no_setting_is_found_with_the_nearest_that_is() -> None:
    """Variables of the client, of other programs and of Kubernetes are ignored."""
    unknown = {
        "THUNDERAGENT_IDEL_LIMIT_S": "THUNDERAGENT_IDLE_LIMIT_S",
        "THUNDERAGENT_POLL_INTERVAL": "THUNDERAGENT_POLL_INTERVAL_S",
        "thunderagent_backend": "THUNDERAGENT_BACKENDS",
        "THUNDERAGENT_XYZZY": "",
    }
    others = (
        "THUNDERAGENT_IDLE_LIMIT_S",
        "thunderagent_port",
        "THUNDERAGENT_KEY",
        "THUNDERAGENT_PROXY",
        "THUNDERAGENT_PROGRAM_ID",
        "THUNDERAGENT_SERVICE_HOST",
        "THUNDERAGENT_SERVICE_PORT_HTTP",
        "THUNDERAGENT_PORT_8300_TCP_ADDR",
        "THUNDERAGENT_ADMIN_SERVICE_PORT",
        "THUNDERAGENTS_ALL",
        "PATH",
    )
    assert unknown_variables([*unknown, *others]) == unknown


@pytest.mark.parametrize(
    "url",
    [
        "redis://:pa/ss@h",
        "redis://:12/ss@h",
        "redis://:12?ss@h",
        "redis://user:12#ss@h",
        "redis://:ss[x@h",
        "h:6379/ss",
        "redis://h:0/ss",
        "",
    ],
)
def test_a_store_that_is_no_url_is_refused_without_its_words(url: str) -> None:
    """The text may have a password, and a cut within a password would name another host."""
    with pytest.raises(ConfigurationError, match="store: is not a URL") as refused:
        ServeConfig.load(store=url)
    assert "ss@" not in str(refused.value)
    told = f"{refused.value} {refused.value.__cause__} {refused.value.__context__}"
    assert not any(part in told for part in ("pa/", ":12", "ss@", "ss[", "/ss"))


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://:p%2Fw@h:6379/1", "rediss://user:p@[::1]:1", "unix:///run/a@b?db=1"]
)
def test_a_store_has_a_url_and_its_password_is_shown_nowhere(url: str) -> None:
    """The configuration as a whole does not show it either."""
    config = ServeConfig.load(store=url)
    assert config.store is not None
    assert config.store.get_secret_value() == url
    assert url not in repr(config)


@pytest.mark.parametrize(
    "url", ["10.0.0.1:8400", "http://h", "http://h:port", "http://h:99999", "http://[::1", "ftp://h:1"]
)
def test_a_scheduler_is_reached_at_a_url_with_a_port(url: str) -> None:
    """Otherwise standbys would end at another one, or watch none."""
    with pytest.raises(ConfigurationError, match=r"reached_at: .* is not a URL"):
        ServeConfig.load(reached_at=url)
    assert ServeConfig.load(reached_at="http://[::1]:8400").reached_at == "http://[::1]:8400"


def test_a_length_names_no_program() -> None:
    """What a head says of its program is remembered for heads that differ in the length alone."""
    assert ServeConfig(program_headers=("X-Rollout",)).program_headers == ("X-Rollout",)
    with pytest.raises(ValidationError, match="names no program"):
        ServeConfig(program_headers=("X-Rollout", "content-length"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('port = 8300\nhosst = "x"\n', "line 2: hosst: there is no such key; did you mean host?"),
        ('[sandbox_templates.py]\ndrivr = "docker"\n', "line 2: sandbox_templates.py.drivr: there is no such key; did"),
        (
            'a = {}\nsandbox_templates = {py = {imag = "u"}}\n',
            "line 2: sandbox_templates.py.imag: there is no such key",
        ),
        ('host = "x"\n\nport = "eighty"\n', "line 3: port: Input should be a valid integer"),
        ("port = 99999\n", "line 1: port: Input should be less than or equal to 65535"),
        ('# port = 1\n"port" = -1\n', "line 2: port: Input should be greater than or equal to 0"),
        ("api_keys = 5\n", "line 1: api_keys: give a list, or a text with commas"),
        ('policy_args = "n"\n', "line 1: policy_args: 'n' is not name=value"),
        ('[policy_args]\nn = "6"\nport = "1"\n[zzzz]\n', "line 4: zzzz: there is no such key"),
        ("port = 1\nport = 2\n", "thunderagent.toml: not TOML: Cannot overwrite a value"),
        ("port: 8300\n", "thunderagent.toml: not TOML: Expected '='"),
        (
            'log_level = "inof"\n',
            "line 1: log_level: Input should be 'debug', 'info', 'warning' or 'error'; did you mean info?",
        ),
        ('[sandbox_templates.py]\ndriver = "dokcer"\n', "line 2: sandbox_templates.py.driver: "),
    ],
)
def test_a_fault_in_the_file_names_it_with_its_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    """A key in a table is looked for behind the table's name; a comment is no key."""
    with pytest.raises(ConfigurationError) as refused:
        ServeConfig.load(toml(tmp_path, text))
    assert message in refused.value.message
    assert str(tmp_path / "thunderagent.toml") in refused.value.message


def test_a_file_in_another_encoding_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes('# caf\xe9\nhost = "x"\n'.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"latin\.toml: not UTF-8: "):
        ServeConfig.load(path)


@pytest.mark.parametrize(("given", "count"), [({}, 2), ({"judge_every_turns": 1}, 10), ({"judge_every_turns": 50}, 1)])
def test_the_failures_that_a_judge_may_predict_follow_how_often_it_is_asked(given: dict[str, int], count: int) -> None:
    """ORBIT's ten are of verdicts at each turn; a number that is given stays."""
    assert ServeConfig.load(judge_url="replicas", **given).judge_fails_count == count
    assert ServeConfig.load(judge_url="replicas", judge_fail_count=7, **given).judge_fails_count == 7
