"""The settings of a service: their sources, and the messages for wrong ones."""

from pathlib import Path

import pytest

from keyloft.core.addresses import without_login
from keyloft.errors import InvalidArgument
from keyloft.plugins.quotas import Quota, Quotas
from keyloft.server.config import SETTINGS, VARIABLES, Config, check_service, load
from keyloft.server.environment import mistyped_variables


def test_without_any_source_all_have_their_defaults() -> None:
    config = load({}, {})
    assert config == Config()
    assert (config.database, config.nats, config.nats_port) == ("sqlite:///keyloft.db", (), 4222)
    assert config.http_address() == ("127.0.0.1", 9464)
    check_service(config)


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keyloft.toml"
    file.write_text('nats_port = 1\ndeadline = 1\nqueue = "file"\n')
    environment = {"KEYLOFT_NATS_PORT": "2", "KEYLOFT_DEADLINE": "2", "KEYLOFT_CONFIG": str(file)}
    config = load({"nats_port": "3", "config": None}, environment)
    assert (config.nats_port, config.deadline, config.queue) == (3, 2.0, "file")


def test_variables_that_kubernetes_sets_for_services_are_passed_over() -> None:
    of_services = {
        "KEYLOFT_NATS_PORT": "tcp://10.0.0.1:4222",
        "KEYLOFT_NATS_PORT_4222_TCP": "tcp://10.0.0.1:4222",
        "KEYLOFT_NATS_PORT_4222_TCP_PORT": "4222",
        "KEYLOFT_NATS_SERVICE_HOST": "10.0.0.1",
        "KEYLOFT_NATS_SERVICE_PORT_CLIENT": "4222",
        "KEYLOFT_HTTP_PORT": "udp://10.0.0.1:9464",
        "KEYLOFT_SERVICE_HOST": "10.0.0.1",
        "KEYLOFT_PORT": "tcp://10.0.0.1:9464",
    }
    assert load({}, of_services) == Config()
    assert mistyped_variables(VARIABLES, of_services) == []


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        ("KEYLOFT_NATS", "KEYLOFT_NATS_URL"),
        ("KEYLOFT_DATABASE", "KEYLOFT_DATABASE_URL"),
        ("KEYLOFT_DATABSE_URL", "KEYLOFT_DATABASE_URL"),
        ("KEYLOFT_NATS_PASWORD", "KEYLOFT_NATS_PASSWORD"),
    ],
)
def test_what_a_mistyped_variable_means_is_suggested(mistyped: str, meant: str) -> None:
    assert mistyped_variables(VARIABLES, {mistyped: "x"}) == [(mistyped, meant)]


@pytest.mark.parametrize("name", ["KEYLOFT_NATS_URL", "KEYLOFT_HTTP"])
def test_only_what_kubernetes_can_have_set_is_passed_over(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}: "):
        load({}, {name: "tcp://10.0.0.1:4222"})


def test_every_setting_can_come_from_every_source(tmp_path: Path) -> None:
    secret = tmp_path / "file"
    secret.touch()
    samples = {
        "database": "app.db",
        "durability": "relaxed",
        "nats": "nats://one:1,nats://two:2",
        "http": "0.0.0.0:80",
        "http_token": "sixteen-characters",
        "http_make_token": "yes",
        "http_page": "read-only",
        "http_origins": "https://app.example",
        "http_connections": "77",
        "prefixes": "a.b,c",
        "quotas": "trivia:5:0",
        "log_level": "debug",
        "log_format": "json",
    }
    for name, setting in SETTINGS.items():
        usual = secret if setting.metavar == "FILE" else 7 if isinstance(setting.default, (int, float)) else "word"
        text = str(samples.get(name, usual))
        # Some need others: a password its user.
        beside = {"nats_user": "me", "nats_cert": str(secret), "http_cert": str(secret)}
        file = tmp_path / f"{name}.toml"
        quoted = f'"{text}"' if not text.isdigit() else text
        others = "".join(f'{other} = "{value}"\n' for other, value in beside.items() if other != name)
        file.write_text(f"{name} = {quoted}\n{others}")
        by_flag = load({**beside, name: text}, {})
        variables = {SETTINGS[other].environment: value for other, value in beside.items()}
        by_environment = load({}, {**variables, setting.environment: text})
        by_file = load({"config": str(file)}, {})
        assert by_flag == by_environment == by_file
        assert getattr(by_flag, name) != setting.default


@pytest.mark.parametrize(
    "host", ["http://kv.example", "kv.example:9464", "kv.example/", "*", "*.example", "k\u00f6.example", "[::1]:80"]
)
def test_hosts_that_no_request_names_are_refused(host: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--http-hosts: expected a name or address .*, as in kv\.example, got"):
        load({"http_hosts": f"fine.example,{host}"}, {})


@pytest.mark.parametrize(
    "origin",
    [
        *["app.example", "app.example:8080", "https://", "https://app.example/page", "https://*.example"],
        *["https://app.example:443", "http://app.example:80/", "https://me@app.example", "https://k\u00f6.example"],
    ],
)
def test_origins_that_no_page_has_are_refused(origin: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--http-origins: expected scheme and host, .* as in https:"):
        load({"http_origins": f"https://fine.example,{origin}"}, {})


def test_hosts_and_origins_that_can_match_are_taken() -> None:
    hosts = ("kv.example", "KV_1.internal", "10.0.0.1", "::1", "[fe80::1]")
    assert load({"http_hosts": ",".join(hosts)}, {}).http_hosts == hosts
    origins = ("*", "null", "https://App.example/", "http://localhost:5173", "https://[::1]:8443", "app-x://id")
    assert load({"http_origins": ",".join(origins)}, {}).http_origins == origins


def test_an_empty_variable_counts_as_absent() -> None:
    assert load({}, {"KEYLOFT_NATS_URL": "", "KEYLOFT_NATS_PORT": ""}) == Config()


def test_a_list_in_the_file_can_be_an_array(tmp_path: Path) -> None:
    file = tmp_path / "keyloft.toml"
    file.write_text('nats = ["nats://one:1", "nats://two:2"]\n')
    assert load({"config": str(file)}, {}).nats == ("nats://one:1", "nats://two:2")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("nats_port", "70000", "--nats-port: expected a whole number of at most 65535"),
        ("nats_port", "x", "--nats-port: expected a whole number"),
        ("deadline", "0", "--deadline: expected a number above 0"),
        ("deadline", "nan", "--deadline: expected a number above 0"),
        ("cleanup_every", "inf", "--cleanup-every: expected a number of at most"),
        ("durability", "maybe", "--durability: expected one of full, relaxed"),
        ("log_level", "loud", "--log-level: expected one of debug, info, warning, error"),
        ("http", "9464", "--http: expected HOST:PORT"),
        ("http", "localhost:70000", "--http: expected HOST:PORT"),
        ("prefixes", ",", "--prefixes: expected a list of at least 1"),
        ("prefixes", "a,a.b", "--prefixes: the prefix 'a.b' is inside 'a'"),
        ("prefixes", "a.*", "--prefixes: expected a prefix such as db.kv"),
        ("nats", "http://x", "--nats: expected an address like nats://"),
        ("nats_creds", "no-such-file", "--nats-creds: the file no-such-file does not exist"),
        ("nats_password", "secret", "--nats-password needs --nats-user"),
        ("metrics_prefix", "9-", "--metrics-prefix: expected text"),
        ("queue", "a b", "--queue: expected text"),
        ("quota_keys", "-1", "--quota-keys: expected a whole number of at least 0"),
        ("quotas", "trivia:5", "--quotas: expected PLUGIN:KEYS:BYTES, as in trivia:5000:1000000, got 'trivia:5'"),
        ("quotas", "Trivia:5:5", "--quotas: "),
        ("quotas", "trivia:5:5,trivia:6:6", "--quotas: expected one quota for each plugin, got two for trivia"),
    ],
)
def test_a_wrong_setting_is_named_with_its_source(name: str, text: str, expected: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        load({name: text}, {})
    assert str(refused.value).startswith(expected)


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"^KEYLOFT_NATS_PORT: expected a whole number"):
        load({}, {"KEYLOFT_NATS_PORT": "many"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('nats_port = "4222"', r"nats_port: expected a whole number, got text"),
        ("nats_port = true", r"nats_port: expected a whole number, got bool"),
        ("database = 1", r"database: expected text"),
        ("nats = [1]", r"nats: expected text"),
        ("nats_prot = 1", r"there is no setting nats_prot; did you mean nats_port\?"),
        ("[serve]", r"\[serve\]: settings are in no section; remove this line"),
        ("[serve]\ndeadline = 5", r"\[serve\]: settings are in no section"),
        ("nats_port 4222", r"is not TOML: .*line 1"),
        ("\x00", r"is not TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_the_file(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "keyloft.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=rf"keyloft\.toml: .*{expected}"):
        load({"config": str(file)}, {})


def test_a_missing_file_is_reported() -> None:
    with pytest.raises(InvalidArgument, match=r"^nowhere\.toml: the configuration can't be read: No such file"):
        load({"config": "nowhere.toml"}, {})


def test_only_what_matters_to_a_command_is_read() -> None:
    assert load({}, {"KEYLOFT_NATS_PORT": "x"}, only=["database"]) == Config()


def test_a_login_without_a_server_to_log_in_to_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--nats-user needs --nats"):
        check_service(load({"nats_user": "SERVICE"}, {}))


def test_quotas_have_a_default_and_exceptions() -> None:
    assert load({}, {}).plugin_quotas() == Quotas()
    given = {"quota_keys": "10", "quota_bytes": "2000", "quotas": "big:500:0, free:0:0"}
    quotas = load(given, {}).plugin_quotas()
    assert quotas.of("any") == Quota(keys=10, bytes=2000)
    assert quotas.of("big") == Quota(keys=500)
    assert quotas.of("free") is None


def test_the_page_can_be_turned_off_or_on_ipv6() -> None:
    assert load({"http": "off"}, {}).http_address() is None
    assert load({"http": "[::1]:80"}, {}).http_address() == ("::1", 80)


def test_passwords_are_not_shown() -> None:
    [address] = load({"nats": "me:secret@host:4222"}, {}).nats
    assert without_login(address) == "nats://host:4222"
