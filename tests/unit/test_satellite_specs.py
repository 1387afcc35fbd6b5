"""What a satellite's spec says: the same from code, a file and the wire, and refused by name when it is wrong."""

import inspect
from pathlib import Path

import msgspec
import pytest

import everdeck
from everdeck import Satellite, Secret, SpecError, WorkerSpec, config
from everdeck.satellites import completed


def handle(message: object) -> None:
    """A function that a satellite can import."""


def test_a_satellite_is_a_bound_worker_that_reports() -> None:
    """What being a satellite means is written into the spec, whoever made it."""
    spec = Satellite.telegram(Secret("1:abc"), labels={"user": "bob"})

    assert spec.lifetime == "bound"
    assert spec.health is not None
    assert spec.health.notify
    assert spec.health.watchdog_seconds
    assert spec.command[1:] == ("-m", "everdeck.satellites", "telegram")
    assert spec.labels == {"user": "bob"}
    assert spec.satellite is not None
    assert spec.satellite.options == {"base_url": "https://api.telegram.org", "first_run": "skip"}


def test_no_secret_is_in_the_options() -> None:
    """A token or password is a secret file and nothing else."""
    for spec in (
        Satellite.telegram("1:abc-hidden"),
        Satellite.gmail("a@example.org", password="abc-hidden"),
        Satellite.gmail("a@example.org", oauth={"refresh_token": "abc-hidden"}),
        Satellite.smtp("mail.example.org", user="a@example.org", password="abc-hidden"),
        Satellite.webhook("/", secret="abc-hidden", preset="github"),
    ):
        assert b"abc-hidden" not in msgspec.json.encode(spec.without_secret_values())
        assert "abc-hidden" not in repr(spec)


def test_the_constructors_have_the_signatures_that_were_promised() -> None:
    """The first field may be given by position, everything else by name only, each with its default."""
    promised = {
        "telegram": {"base_url": "https://api.telegram.org", "first_run": "skip", "to": None},
        "gmail": {
            "password": None, "oauth": None, "host": "imap.gmail.com", "port": 993, "tls": "tls", "folder": "INBOX",
            "smtp_host": "smtp.gmail.com", "smtp_port": 587, "smtp_tls": "starttls", "after": "seen",
            "first_run": "skip", "to": None,
        },
        "smtp": {"port": 587, "tls": "starttls", "user": None, "password": None, "sender": None, "to": None},
        "cron": {"tz": "UTC", "missed": "once", "to": None},
        "webhook": {"secret": None, "preset": None, "to": None},
    }  # fmt: skip
    for kind, defaults in promised.items():
        parameters = inspect.signature(getattr(everdeck.Satellite, kind)).parameters
        found = {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        assert found == defaults, kind


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Satellite.telegram("1:a", first_run="maybe"), "first_run"),
        (lambda: Satellite.telegram("1:a", base_url="api.telegram.org"), "base_url"),
        (lambda: Satellite.gmail("a@b"), "password"),
        (lambda: Satellite.gmail("a@b", password="x", tls="ssl"), "tls"),
        (lambda: Satellite.gmail("a@b", password="x", after="burn"), "after"),
        (lambda: Satellite.smtp("mail"), "sender"),
        (lambda: Satellite.webhook("hook"), "path"),
        (lambda: Satellite.webhook("/", secret="s", preset="gitlab"), "preset"),
        (lambda: Satellite.webhook("/", preset="github"), "secret"),
        (lambda: Satellite.cron("* * * * *", missed="catch-up"), "missed"),
        (lambda: Satellite.of("pigeon"), "satellite.kind"),
        (lambda: Satellite.of("cron", {"expression": "* * * * *", "colour": 1}), "satellite.colour"),
        (lambda: Satellite.telegram("1:a", to=lambda: None), "to"),
        (lambda: Satellite.telegram("1:a", to="not a target"), "satellite.to"),
        (lambda: completed(WorkerSpec((), satellite=everdeck.SatelliteSpec("telegram"))), "secrets"),
        (lambda: WorkerSpec(()), "command"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(make: object, field: str) -> None:
    """Nothing is written before a spec exists, so a refusal costs nothing."""
    with pytest.raises(SpecError) as refused:
        make()  # type: ignore[operator]

    assert refused.value.field == field


def test_a_function_is_found_again_by_the_satellite() -> None:
    """The spec keeps the function's name and the directory that its module is imported from."""
    spec = Satellite.cron("* * * * *", to=handle)

    assert spec.satellite is not None
    assert spec.satellite.to == f"{__name__}:handle"
    assert spec.satellite.path is None or Path(spec.satellite.path).is_dir()


def test_a_file_says_the_same_as_code(tmp_path: Path) -> None:
    """``satellite = "telegram"`` with a secret file is the spec that ``Satellite.telegram`` makes."""
    (tmp_path / "token").write_text("1:abc\n")
    text = '[worker.bob]\nsatellite = "telegram"\nto = "mybot:handle"\nsecrets = { TOKEN = "token" }\n'

    spec = config.parse(text, tmp_path / "everdeck.toml").workers["bob"]

    expected = Satellite.telegram("1:abc", to="mybot:handle")
    assert spec.satellite is not None
    assert spec.satellite.options == expected.satellite.options  # type: ignore[union-attr]
    assert spec.satellite.to == "mybot:handle"
    assert spec.satellite.path == str(tmp_path.resolve())
    assert spec.secrets["TOKEN"].value == "1:abc"
    assert spec.lifetime == "bound"


def test_a_file_may_give_options_in_a_table(tmp_path: Path) -> None:
    """``[worker.x.satellite]`` with kind and options."""
    text = '[worker.tick]\n[worker.tick.satellite]\nkind = "cron"\nexpression = "0 9 * * *"\ntz = "Europe/Berlin"\n'

    spec = config.parse(text, tmp_path / "everdeck.toml").workers["tick"]

    assert spec.satellite is not None
    assert spec.satellite.options == {"expression": "0 9 * * *", "tz": "Europe/Berlin", "missed": "once"}


def test_a_file_with_a_wrong_option_is_refused_with_its_line(tmp_path: Path) -> None:
    """The problem names the worker and what is accepted."""
    text = '[worker.tick]\nsatellite = { kind = "cron", expresion = "0 9 * * *" }\n'

    with pytest.raises(everdeck.EverdeckError, match="expresion"):
        config.parse(text, tmp_path / "everdeck.toml")
