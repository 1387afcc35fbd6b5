"""The installed command, typed as a person types it."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import httpx
import pexpect
import pytest

from everdeck.cli import VERBS, main
from everdeck.client import Daemon
from everdeck.kernel import flock
from everdeck.model import Stop, WorkerSpec
from everdeck.registry import read_only
from everdeck.statedir import StateDir
from support.cli_daemon import EVERDECK, PATIENCE_SECONDS, Person, pidfd_of
from support.waiting import until

SLEEPER = ("--", "sleep", "1000")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Person]:
    """A deck that nobody owns yet."""
    person = Person(tmp_path / "state")
    try:
        yield person
    finally:
        person.leaves()


@pytest.fixture
def owner(alone: Person) -> Person:
    """A deck with a daemon of its own, which the test may kill."""
    alone.up()
    return alone


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """One daemon for the tests that let it live."""
    person = Person(tmp_path_factory.mktemp("cli") / "state")
    try:
        person.up()
        yield person
    finally:
        person.leaves()


@pytest.fixture
def person(shared: Person) -> Iterator[Person]:
    """A deck with a daemon and no workers."""
    try:
        yield shared
    finally:
        shared.types("rm", "--all", "--yes")


def recorded_spec(person: Person, name: str) -> WorkerSpec:
    """What the registry says the worker runs."""
    registry = read_only(StateDir(person.state).registry)
    try:
        return next(record.spec for record in registry.records() if record.name == name)
    finally:
        registry.close()


# --- help -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``--help`` says what it does, takes ``--state`` and, where it helps, shows examples."""
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "usage" in shown.lower()
    assert "--state" in shown
    assert "example" in shown or verb in {"demo", "top", "completion"}
    assert main(["help", verb]) == 0
    assert capsys.readouterr().out == shown


def test_the_overview_names_every_verb_and_the_exit_codes(tmp_path: Path) -> None:
    """Typing nothing is used wrongly; ``--help`` is not."""
    shown = Person(tmp_path).types("--help").stdout
    for verb in VERBS:
        assert f"\n  {verb} " in shown
    assert "3 no owner is running" in shown
    assert Person(tmp_path).types(expect=2).stderr.startswith("usage")
    assert Person(tmp_path).types("--version").stdout.startswith("everdeck ")


@pytest.mark.parametrize(
    "words",
    [
        ("pss",),
        ("--nonsense", "ps"),
        ("ps", "--nonsense"),
        ("start",),
        ("start", "alice", "--"),
        ("stop",),
        ("stop", "alice", "--all"),
        ("logs",),
        ("adopt", "alice", "nonsense"),
        ("adopt", "alice", "1"),
        ("export", "nonsense"),
        ("up", "--sample-seconds", "0"),
        ("up", "--tls-cert", "x"),
        ("top",),
    ],
)
def test_wrong_use_is_exit_code_2(words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started, and standard error says what was wrong."""
    assert main(["--state", str(tmp_path / "state"), *words]) == 2
    told = capsys.readouterr()
    assert told.err
    assert not told.out


def test_a_mistyped_verb_is_answered_with_the_one_meant(tmp_path: Path) -> None:
    """Suggestions for verbs."""
    assert "did you mean 'restart'?" in Person(tmp_path).types("restrat", expect=2).stderr


@pytest.mark.parametrize("word", ["liist", "dwn", "donw", "removee", "stpo", "kill", "destroy", "down2", "rn"])
def test_a_verb_that_destroys_is_never_suggested(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Who mistyped something else may press Enter on what is suggested."""
    assert main([word]) == 2
    told = capsys.readouterr().err
    assert not any(f"did you mean '{verb}'" in told for verb in ("rm", "remove", "delete", "stop", "down", "demo"))


def test_second_names_are_the_verbs_they_stand_for(person: Person) -> None:
    """What people type who come from another tool."""
    person.types("start", "alice", *SLEEPER)
    for alias in ("ls", "list", "status"):
        assert "alice  running" in person.types(alias).stdout
    for alias in ("show", "describe"):
        assert "sleep 1000" in person.types(alias, "alice").stdout
    person.types("start", "bob", *SLEEPER)
    assert person.types("remove", "alice").stdout == person.types("delete", "bob").stdout.replace("bob", "alice")
    assert "--workers" in person.types("help", "quit").stdout
    assert "unknown verb 'nonsense'" in person.types("help", "nonsense", expect=2).stderr


def test_a_command_without_two_dashes_is_answered_with_what_to_type(tmp_path: Path) -> None:
    """The whole line again, with -- where it belongs."""
    told = Person(tmp_path).types("start", "alice", "-e", "A=1", "python3", "-u", "my bot.py", expect=2).stderr
    assert "type: everdeck start alice -e A=1 -- python3 -u 'my bot.py'" in told


def test_completion_offers_what_may_follow_an_option(person: Person, tmp_path: Path) -> None:
    """Policies after --restart, states after --state-is, names of workers, verbs within feed."""
    person.types("start", "alice", *SLEEPER)

    def offered(*words: str) -> list[str]:
        return person.types("complete", "--", *words).stdout.split()

    assert offered("start", "x", "--restart", "") == ["always", "on-failure", "never"]
    assert offered("start", "x", "--restart=n") == ["--restart=never"]
    assert offered("start", "x", "--cwd", "") == []
    assert offered("ps", "--state-is", "f") == ["failed"]
    assert offered("list", "al") == ["alice"]
    assert offered("feed", "")[:2] == ["satellite", "dead-letters"]
    assert offered("feed", "dead-letters", "r") == ["retry"]
    assert "--stream" in offered("feed", "dead-letters", "list", "--")
    assert "--install-completion" not in person.types("feed", "--help").stdout


# --- what cannot be used ----------------------------------------------------------------------------------------


def test_a_state_directory_that_cannot_be_used_is_an_answer_not_a_traceback(tmp_path: Path) -> None:
    """`up --detach` under a file and under a directory that nobody may write to."""
    (tmp_path / "file").write_text("")
    for state in (tmp_path / "file" / "state", Path("/proc/everdeck")):
        told = Person(state).types("up", "--detach", "--no-http", expect=1).stderr
        assert "Traceback" not in told
        assert told.startswith(f"everdeck: {state}: ")
        told = Person(state).types("up", "--no-http", expect=1).stderr
        assert "Traceback" not in told
        assert str(state) in told


def test_the_deck_of_another_user_is_an_answer_not_a_traceback(owner: Person) -> None:
    """It says whose deck it is. Root without its power over other people's files sees what any user sees."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a deck to another user")
    owner.types("start", "alice", *SLEEPER)
    owner.types("down", "--workers")
    for path in (owner.state, *owner.state.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    for verb in ("logs alice", "logs --all", "ps", "events", "inspect alice", "stop alice", "up --detach --no-http"):
        command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--", str(EVERDECK)]
        told = subprocess.run(
            [*command, "--state", str(owner.state), *verb.split()],
            capture_output=True,
            text=True,
            env=owner.env,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert told.returncode == 1, f"{verb}: {told.stdout}{told.stderr}"
        assert "Traceback" not in told.stderr, told.stderr
        assert "belongs to nobody" in told.stderr, f"{verb}: {told.stderr}"


def test_names_and_states_that_are_not_there_are_errors(person: Person) -> None:
    """Silence would look like an empty deck."""
    person.types("start", "alice", *SLEEPER)
    assert "did you mean 'alice'?" in person.types("ps", "alcie", expect=1).stderr
    assert "did you mean 'alice'?" in person.types("events", "alcie", expect=1).stderr
    assert "invalid choice" in person.types("ps", "--state-is", "runing", expect=2).stderr
    assert "invalid choice" in person.types("events", "--kind", "crushed", expect=2).stderr
    assert person.types("ps", "alice", "-q").stdout == "alice\n"
    person.types("rm", "alice")
    assert "alice" in person.types("events", "alice").stdout


def test_a_rolling_restart_has_one_worker_down_at_a_time(person: Person) -> None:
    """With --parallel 1 the next is touched when the one before runs again; more than is allowed is refused."""
    names = ["alice", "bob", "carol", "dave"]
    for name in names:
        person.types("start", name, *SLEEPER)
    before = {name: person.worker(name)["pid"] for name in names}
    last = int(json.loads(person.types("events", "--json").stdout.splitlines()[-1])["id"])
    assert person.types("restart", "--all", "--parallel", "1").stdout.count("running") == len(names)
    assert all(person.worker(name)["pid"] != before[name] for name in names)
    told = [json.loads(line) for line in person.types("events", "--json", "-n", "100").stdout.splitlines()]
    touched = [event["worker"] for event in told if event["id"] > last and event["worker"] in names]
    assert list(dict.fromkeys(touched)) == names
    assert touched == sorted(touched), "nobody is touched while another is down"
    assert "1 to 256" in person.types("restart", "--all", "--parallel", "0", expect=2).stderr


def test_neither_start_nor_restart_closes_the_breaker(person: Person) -> None:
    """As on the page: a failed worker waits until somebody resets it."""
    person.types("start", "bad", "--max-crashes", "0", "--", "false")
    until(lambda: person.worker("bad")["state"] == "failed")
    for verb in ("start", "restart"):
        assert "reset it" in person.types(verb, "bad", expect=1).stderr
        assert person.worker("bad")["state"] == "failed"


# --- down, login, inspect ---------------------------------------------------------------------------------------


def test_down_ends_the_daemon_and_leaves_adoptable_workers(owner: Person) -> None:
    """With --workers nothing is left; without an owner it is exit code 3."""
    owner.types("start", "stays", *SLEEPER)
    owner.types("start", "goes", "--bound", *SLEEPER)
    pid = owner.worker("stays")["pid"]
    assert "1 workers run on, unsupervised" in owner.types("down").stdout
    seen = owner.seen()
    assert not seen["supervised"]
    assert owner.worker("stays")["pid"] == pid
    assert owner.worker("goes")["pid"] is None
    owner.types("down", expect=3)
    owner.up()
    assert owner.worker("stays")["pid"] == pid
    owner.types("quit", "--workers")
    assert owner.worker("stays")["pid"] is None
    owner.types("ps")


def test_a_connection_that_the_daemon_closed_meanwhile_is_made_again(owner: Person) -> None:
    """`down --workers` may wait for stops longer than a silent connection is kept; then it still ends the daemon."""
    with Daemon(owner.state) as daemon:
        first = daemon.deck()["owner_pid"]
        owner.kills(first)
        second = owner.up()
        assert daemon.leave()["owner_pid"] == second
    until(lambda: not owner.seen()["supervised"], "it left")


def test_login_prints_the_link_that_logs_in(alone: Person) -> None:
    """Whenever it is asked for; by itself it is shown only in a terminal, because a pipe may lead into a log."""
    shown = alone.types("up", "--detach", "--listen", "127.0.0.1:0").stdout
    link = alone.types("login").stdout.strip()
    token = (alone.state / "token").read_text().strip()
    assert link.endswith(f"login#token={token}")
    assert link.partition("login#")[0] in shown
    assert token not in shown
    assert token not in (alone.state / "daemon.log").read_text()
    assert json.loads(alone.types("login", "--json").stdout)["link"] == link
    assert "Everdeck" in httpx.get(link, follow_redirects=True, timeout=PATIENCE_SECONDS).text


def test_login_makes_a_new_token_when_asked(alone: Person) -> None:
    """With a name, a role and an end, so that it can be given away and taken back."""
    alone.types("up", "--detach", "--listen", "127.0.0.1:0")
    link = alone.types("login", "--new", "carol", "--role", "operate", "--expires", "12h").stdout.strip()
    page, _, token = link.partition("login#token=")
    assert token != (alone.state / "token").read_text().strip()
    asked = {"headers": {"Authorization": f"Bearer {token}"}, "timeout": PATIENCE_SECONDS}
    assert httpx.get(f"{page}api/v1/deck", **asked).status_code == 200
    assert "carol" in alone.types("token", "list").stdout
    alone.types("token", "revoke", "carol")
    assert httpx.get(f"{page}api/v1/deck", **asked).status_code == 401
    assert "--new NAME" in alone.types("login", "--role", "read", expect=2).stderr


def test_a_daemon_without_a_page_has_no_link(person: Person) -> None:
    """It says how to have one."""
    assert "--no-http" in person.types("login", expect=1).stderr


def test_inspect_tells_everything_but_values(person: Person, tmp_path: Path) -> None:
    """Spec, directory, names of variables and secrets, ends, layers, files; never a value."""
    (tmp_path / "token").write_text("hush-hush")
    person.types(
        *("start", "alice", "-e", "MOOD=secretly-happy", "--secret", f"TOKEN={tmp_path / 'token'}", "--label", "a=b"),
        *SLEEPER,
        cwd=tmp_path,
    )
    person.types("restart", "alice")
    told = person.types("inspect", "alice").stdout
    for part in ("sleep 1000", str(tmp_path), "MOOD", "TOKEN", "a=b", "L2", "stopped pid", "killed by SIGTERM", "data"):
        assert part in told, part
    assert "hush-hush" not in told
    assert "secretly-happy" not in told
    assert not set("{}[]") & set(told)
    found = json.loads(person.types("inspect", "alice", "--json").stdout)
    assert found["spec"]["cwd"] == str(tmp_path)
    assert found["ends"][-1]["detail"]["exit"] == {"kind": "killed", "signal": 15}
    assert found["paths"]["data"].endswith("workers/alice/data")
    assert "did you mean 'alice'?" in person.types("inspect", "alcie", expect=1).stderr


def test_inspect_tells_without_an_owner_too(owner: Person) -> None:
    """As ps does: from the registry and the kernel, with a word about who would restart it."""
    owner.types("start", "alice", "-e", "MOOD=secretly-happy", *SLEEPER)
    owner.types("start", "bob", *SLEEPER)
    owner.types("stop", "bob")
    owned = json.loads(owner.types("inspect", "alice", "--json").stdout)
    owner.kills(owner.owner())
    shown = owner.types("inspect", "alice", "--json")
    found = json.loads(shown.stdout)
    assert "no owner is running" in shown.stderr
    for same in ("spec", "paths", "holds", "layers"):
        assert found[same] == owned[same], same
    assert [one["pid"] for one in found["tree"]] == [one["pid"] for one in owned["tree"]]
    assert found["status"]["pid"] == owned["status"]["pid"]
    assert json.loads(owner.types("inspect", "bob", "--json").stdout)["tree"] == []
    assert "did you mean 'alice'?" in owner.types("inspect", "alcie", expect=1).stderr


def test_a_long_name_gives_way_in_its_middle(person: Person) -> None:
    """In a terminal of 80 columns the state is still there; piped on, the name is whole."""
    name = "customer-" + "x" * 100 + "-17"
    person.types("start", name, *SLEEPER)
    assert name in person.types("ps").stdout
    command = f"{EVERDECK} --state {person.state} ps"
    shown = pexpect.run(command, env={**person.env, "COLUMNS": "80"}, dimensions=(24, 80))
    line = next(line for line in shown.decode().splitlines() if line.startswith("customer-"))
    assert "…" in line
    assert "-17 " in line
    assert "running" in line[:60]


def test_lines_have_times_and_json(person: Person) -> None:
    """The time stands before lines that have none of their own; a progress bar shows its last state."""
    said = "printf 'plain\\n2026-01-02 03:04:05 stamped\\n10%%\\r50%%\\r100%% done\\n'; exec sleep 1000"
    person.types("start", "alice", "--", "sh", "-c", said)
    until(lambda: "100% done" in person.types("logs", "alice").stdout)
    shown = person.types("logs", "alice", "--times").stdout.splitlines()
    lines = [line for line in shown if not line.startswith("--- everdeck")]  # the mark of its start comes when it comes
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d plain", lines[-3])
    assert lines[-2] == "2026-01-02 03:04:05 stamped"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 100% done", lines[-1])
    told = [json.loads(line) for line in person.types("logs", "alice", "--json").stdout.splitlines()]
    told = [line for line in told if not line["line"].startswith("--- everdeck")]
    assert [line["line"] for line in told] == ["plain", "2026-01-02 03:04:05 stamped", "100% done"]
    assert {line["worker"] for line in told} == {"alice"}
    assert abs(datetime.fromisoformat(told[0]["at"]).timestamp() - time.time()) < PATIENCE_SECONDS


# --- where a worker runs ----------------------------------------------------------------------------------------


def test_a_worker_runs_where_its_command_was_typed_or_its_file_stands(person: Person, tmp_path: Path) -> None:
    """The first example of the help, word for word: python3 bot.py beside the person and beside the file."""
    typed, filed = tmp_path / "typed", tmp_path / "filed"
    for place in (typed, filed):
        place.mkdir()
        (place / "bot.py").write_text(f"import signal; print('bot in {place.name}', flush=True); signal.pause()")
    person.types("start", "alice", "--", sys.executable, "bot.py", cwd=typed)
    (filed / "everdeck.toml").write_text(f"[worker.bob]\ncommand = ['{sys.executable}', 'bot.py']\n")
    person.types("apply", filed / "everdeck.toml", cwd=typed)
    person.types("start", "carol", "--cwd", "filed", "--", sys.executable, "bot.py", cwd=tmp_path)
    for name, place in (("alice", typed), ("bob", filed), ("carol", filed)):
        until(lambda name=name, place=place: f"bot in {place.name}" in person.types("logs", name).stdout)
        assert person.worker(name)["crashes"] == 0


# --- without an owner -------------------------------------------------------------------------------------------


def test_with_no_owner_reading_works_and_says_so_and_acting_is_exit_code_3(owner: Person) -> None:
    """Being up and being supervised are two facts."""
    owner.types("start", "alice", "--", "sh", "-c", "echo hello from alice; exec sleep 1000")
    pid = owner.worker("alice")["pid"]
    until(lambda: "hello from alice" in owner.types("logs", "alice").stdout)
    owner.kills(owner.owner())

    seen = owner.seen()
    assert seen["supervised"] is False
    assert seen["owner_pid"] is None
    assert [(worker["name"], worker["state"], worker["pid"]) for worker in seen["workers"]] == [
        ("alice", "running", pid)
    ]
    assert "not supervised" in owner.types("ps").stdout
    logs = owner.types("logs", "alice")
    assert "hello from alice" in logs.stdout
    assert "not supervised" in logs.stderr
    events = owner.types("events", "--json")
    assert "not supervised" in events.stderr
    assert "started" in [json.loads(line)["kind"] for line in events.stdout.splitlines()]
    for words in (("stop", "alice"), ("start", "bob", *SLEEPER), ("rm", "--all"), ("reload",), ("adopt", "x", "99999")):
        refused = owner.types(*words, expect=3)
        assert "everdeck up" in refused.stderr
    assert Path(f"/proc/{pid}").exists()


def test_an_empty_place_is_an_empty_deck(alone: Person) -> None:
    """Reading before anything was ever started makes nothing and fails at nothing."""
    assert alone.seen() == {"supervised": False, "owner_pid": None, "workers": []}
    assert alone.types("events", "--json").stdout == ""
    alone.types("stop", "alice", expect=3)
    assert not alone.state.exists()


def test_a_deck_inside_a_program_is_reached_like_a_daemons(alone: Person) -> None:
    """A program that uses the library owns the deck and serves the verbs; what only a daemon has says who it is."""
    program = (
        "import sys\nfrom everdeck import Deck\n"
        "with Deck(sys.argv[1]) as deck:\n"
        "    deck.start('alice', ['sleep', '1000'])\n    print('ready', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(alone.state)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone.env)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        seen = alone.seen()
        assert (seen["supervised"], seen["owner_pid"]) == (True, owner.pid)
        assert alone.types("restart", "alice").stdout.startswith("alice running")
        assert json.loads(alone.types("events", "--json").stdout.splitlines()[-1])["kind"] == "restarted"
        assert f"owned by pid {owner.pid}" in alone.types("reload", expect=1).stderr
        assert alone.types("rm", "alice").stdout == "alice removed\n"
    finally:
        owner.communicate()
    assert owner.returncode == 0


# --- the verbs --------------------------------------------------------------------------------------------------


def test_a_life_from_start_to_rm(person: Person) -> None:
    """Each verb does its thing, says so, and exits with 0; repeated, it is the same."""
    assert "running" in person.types("start", "alice", "-e", "COLOUR=teal", *SLEEPER).stdout
    first = person.worker("alice")
    assert first["state"] == "running"
    environ = Path(f"/proc/{first['pid']}/environ").read_bytes()
    assert b"COLOUR=teal" in environ

    assert json.loads(person.types("start", "alice", "--json").stdout)["pid"] == first["pid"]
    person.types("start", "alice", "-e", "COLOUR=teal", *SLEEPER)
    assert person.worker("alice")["pid"] == first["pid"]
    changed = person.types("start", "alice", "--", "sleep", "2000", expect=1)
    assert "another spec" in changed.stderr
    person.types("start", "alice", "--replace", "--", "sleep", "2000")
    assert person.worker("alice")["pid"] != first["pid"]

    person.types("restart", "alice")
    person.types("reset", "alice")
    assert "stopped" in person.types("stop", "alice").stdout
    person.types("stop", "alice")
    assert person.worker("alice")["state"] == "stopped"
    person.types("start", "alice")
    person.types("rm", "alice")
    assert person.seen()["workers"] == []
    person.types("rm", "alice", expect=1)


def test_state_may_stand_before_or_after_the_verb_or_in_the_environment(person: Person) -> None:
    """``--state`` before, ``--state`` after and ``$EVERDECK_STATE`` are one."""
    here = str(person.state)
    for command, env in (
        ([str(EVERDECK), "--state", here, "ps", "--json"], {}),
        ([str(EVERDECK), f"--state={here}", "ps", "--json"], {}),
        ([str(EVERDECK), "ps", "--state", here, "--json"], {}),
        ([str(EVERDECK), "ps", "--json"], {"EVERDECK_STATE": here}),
    ):
        shown = subprocess.run(command, capture_output=True, check=True, env=person.env | env).stdout
        assert json.loads(shown)["supervised"] is True


def test_unknown_and_refused_names(person: Person) -> None:
    """An unknown name is exit 1 with the near ones; one that can never exist is exit 2."""
    person.types("start", "alice", *SLEEPER)
    person.types("start", "bob", *SLEEPER)
    assert "did you mean 'alice'?" in person.types("stop", "alcie", expect=1).stderr
    assert "did you mean 'alice'?" in person.types("logs", "alcie", expect=1).stderr
    many = person.types("restart", "alcie", "bob", expect=1)
    assert "bob running" in many.stdout
    assert "did you mean 'alice'?" in many.stderr
    for name in ("a/b", "..", "x" * 129, "ü", "a b", ""):
        person.types("start", name, *SLEEPER, expect=2)
    assert [worker["name"] for worker in person.seen()["workers"]] == ["alice", "bob"]


def test_all_of_them_at_once(person: Person) -> None:
    """``--all`` acts on every worker in parallel; results are told for each, or counted when there are many."""
    for number in range(5):
        person.types("start", f"w{number}", "--grace", "30", *SLEEPER)
    told = json.loads(person.types("restart", "--all", "--json").stdout)
    assert [(result["name"], result["ok"]) for result in told["results"]] == [(f"w{n}", True) for n in range(5)]
    assert person.types("stop", "--all").stdout.split() == [word for n in range(5) for word in (f"w{n}", "stopped")]
    person.types("rm", "--all")
    assert person.types("stop", "--all").stdout == "no workers\n"


def test_a_program_that_is_not_there_is_told(person: Person) -> None:
    """A start that cannot work is exit 1, names the program, and leaves nothing that runs."""
    refused = person.types("start", "alice", "--", "/no/such/program", expect=1)
    assert "/no/such/program" in refused.stderr


def test_secrets_reach_the_worker_and_nobody_else(person: Person, tmp_path: Path) -> None:
    """The value is in a file of the worker's own and in no listing, no event, no log and no command line."""
    (tmp_path / "token").write_text("hunter2-hunter2\n")
    script = 'cat "$CREDENTIALS_DIRECTORY/TOKEN" > "$EVERDECK_DIR/data/got"; exec sleep 1000'
    person.types("start", "alice", "--secret", f"TOKEN={tmp_path / 'token'}", "--", "sh", "-c", script)
    got = person.state / "workers" / "alice" / "data" / "got"
    until(lambda: got.exists() and got.read_text() == "hunter2-hunter2")
    for words in (("ps", "--json"), ("events", "--json"), ("logs", "alice"), ("doctor", "--json")):
        assert "hunter2" not in person.types(*words, expect=None).stdout
    shown = subprocess.run(["ps", "axeww"], capture_output=True, text=True, check=True).stdout
    assert "hunter2" not in shown
    assert "hunter2" not in (person.state / "daemon.log").read_text()


def test_logs_follow_and_since(person: Person) -> None:
    """``-f`` shows what comes, ``--since`` and ``--grep`` choose."""
    person.types("start", "alice", "--", "sh", "-c", "echo early; exec sleep 1000")
    until(lambda: "early" in person.types("logs", "alice").stdout)
    follower = subprocess.Popen(
        [EVERDECK, "--state", person.state, "logs", "alice", "-f"], stdout=subprocess.PIPE, text=True, env=person.env
    )
    try:
        assert follower.stdout is not None
        while "early" not in follower.stdout.readline():
            pass
        person.types("restart", "alice")
        while "early" not in follower.stdout.readline():
            pass
    finally:
        follower.kill()
        follower.communicate()
    assert "early" in person.types("logs", "alice", "--since", "1h", "--grep", "early").stdout
    person.types("logs", "alice", "--since", "nonsense", expect=2)


def test_events_follow_survives_the_owner(owner: Person) -> None:
    """A follower resumes after the last event it saw, at the next owner, and misses none."""
    follower = subprocess.Popen(
        [EVERDECK, "--state", owner.state, "events", "-f", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=owner.env,
    )
    try:
        assert follower.stdout is not None
        assert follower.stderr is not None
        seen = [json.loads(follower.stdout.readline())]
        owner.types("start", "alice", *SLEEPER)
        owner.kills(owner.owner())
        assert "not supervised" in follower.stderr.readline()
        owner.up()
        while seen[-1]["kind"] != "adopted":
            seen.append(json.loads(follower.stdout.readline()))
    finally:
        follower.kill()
        follower.communicate()
    ids = [event["id"] for event in seen]
    assert ids == list(range(1, len(ids) + 1))
    recorded = [json.loads(line) for line in owner.types("events", "--json").stdout.splitlines()]
    assert recorded[: len(seen)] == seen
    assert owner.types("events", "-n", "1", "alice").stdout.count("\n") == 1


def test_ps_costs_little_more_than_the_interpreter_and_its_imports(person: Person) -> None:
    """The verb that is typed all day, against what Python needs for its parts; the best of five of each, in turns."""

    def cost(run: Callable[[], object]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def bare() -> None:
        imports = "import argparse, datetime, json, msgspec, pathlib, shutil, socket, urllib.parse"
        subprocess.run([sys.executable, "-c", imports], check=True)

    person.types("start", "alice", *SLEEPER)
    pairs = [(cost(lambda: person.types("ps")), cost(bare)) for _ in range(5)]
    ours, least = (min(column) for column in zip(*pairs, strict=True))
    assert ours < 3 * least, f"{ours * 1000:.0f} ms, the bare imports {least * 1000:.0f} ms"


def test_a_deep_state_directory_works(tmp_path: Path) -> None:
    """An AF_UNIX address holds 107 bytes; a path of 200 is reached all the same."""
    deep = tmp_path / ("d" * 100) / ("e" * max(1, 210 - len(str(tmp_path)) - 110))
    deep.parent.mkdir(parents=True)
    assert len(str(deep)) >= 200
    person = Person(deep)
    try:
        person.up()
        person.types("start", "alice", *SLEEPER)
        assert person.worker("alice")["state"] == "running"
        person.types("stop", "alice")
    finally:
        person.leaves()


# --- moving and mending -----------------------------------------------------------------------------------------


def test_set_reaches_fields_that_have_no_option_of_their_own(person: Person) -> None:
    """--set takes a path and a value as everdeck.toml has them, and refuses a path that there is not."""
    person.types("start", "alice", "--set", "umask=0o077", "--set", "log.keep=3", "--grace", "0", *SLEEPER)

    spec = recorded_spec(person, "alice")
    assert (spec.umask, spec.log.keep, spec.stop.grace_seconds) == (0o077, 3, 0)
    refused = person.types("start", "bob", "--set", "log.keeps=3", *SLEEPER, expect=2)
    assert "log.keeps" in refused.stderr


def test_options_are_laid_over_a_template(person: Person, tmp_path: Path) -> None:
    """What is typed wins, field by field; a secret that is asked for as env is one."""
    file = tmp_path / "everdeck.toml"
    file.write_text('[template.bot]\ncommand = ["sleep", "1000"]\nstop = {signal = "INT", grace_seconds = 3}\n')
    (tmp_path / "token").write_text("secret")
    person.types("apply", str(file))

    person.types("start", "alice", "--template", "bot", "--grace", "1", "--secret-env", f"TOKEN={tmp_path}/token")

    assert recorded_spec(person, "alice").stop == Stop("INT", grace_seconds=1)
    pid = person.worker("alice")["pid"]
    assert b"TOKEN=secret" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_adopt_takes_over_what_somebody_else_started(person: Person, tmp_path: Path) -> None:
    """The process goes on, is supervised, and is restarted from its command line, directory and chosen variables."""
    stranger = subprocess.Popen(
        ["sleep", "4321"], cwd=tmp_path, env={"BOT_HOME": "/srv/bot", "PATH": os.environ["PATH"]}
    )
    try:
        adopted = json.loads(person.types("adopt", "alice", stranger.pid, "-e", "BOT_HOME", "--json").stdout)
        assert (adopted["pid"], adopted["state"], adopted["adopted"]) == (stranger.pid, "running", True)
        assert "already" in person.types("adopt", "bob", stranger.pid, expect=2).stderr
        person.types("restart", "alice")
        assert stranger.wait(PATIENCE_SECONDS) == -signal.SIGTERM
        pid = person.worker("alice")["pid"]
        assert Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x004321\x00"
        assert Path(f"/proc/{pid}/cwd").readlink() == tmp_path
        assert b"BOT_HOME=/srv/bot" in Path(f"/proc/{pid}/environ").read_bytes()
        person.types("stop", "alice")
    finally:
        stranger.kill()
        stranger.wait()
    person.types("adopt", "carl", stranger.pid, expect=2)


def test_doctor_has_a_verdict_for_each_layer(person: Person) -> None:
    """Features, limits, locks with their holders, layers; and nothing is wrong here."""
    person.types("start", "alice", "--bound", *SLEEPER)
    report = json.loads(person.types("doctor", "--json", expect=None).stdout)
    assert [layer["layer"][:2] for layer in report["layers"]] == ["L1", "L2", "L3", "L4"]
    assert all(layer["holds"] for layer in report["layers"])
    assert report["owner_pid"] == person.owner()
    held = {lock["lock"]: lock["holders"] for lock in report["locks"]}
    assert held["deck.lock"] == [person.owner()]
    assert person.worker("alice")["pid"] in held["workers/alice/lock"]
    assert {"name", "present", "gives", "without"} <= report["features"][0].keys()
    assert [suspect for suspect in report["suspects"] if suspect["deck"] == str(person.state)] == []
    assert "L4 reap at start" in person.types("doctor", expect=None).stdout


def test_doctor_finds_orphans_and_ends_them_only_when_told(person: Person) -> None:
    """A process that carries a cookie of this deck which no record knows; a `no` leaves it, a `yes` ends it."""
    person.types("start", "alice", *SLEEPER)
    folder = person.state / "workers" / "alice"
    env = {"EVERDECK_COOKIE": "0" * 32, "EVERDECK_WORKER": "alice", "EVERDECK_DIR": str(folder)}
    orphan = subprocess.Popen(["sleep", "1000"], env=env)
    try:
        report = json.loads(person.types("doctor", "--json", expect=1).stdout)
        ours = [suspect for suspect in report["suspects"] if suspect["deck"] == str(person.state)]
        assert [(suspect["pid"], suspect["kind"]) for suspect in ours] == [(orphan.pid, "duplicate")]
        person.types("doctor", "--fix", input="n\n", expect=1)
        person.types("doctor", "--fix", input="", expect=1)
        assert orphan.poll() is None
        person.types("doctor", "--fix", input="y\n", expect=None)
        assert orphan.wait(PATIENCE_SECONDS) == -signal.SIGTERM
    finally:
        orphan.kill()
        orphan.wait()
    assert person.worker("alice")["state"] == "running"


def test_doctor_names_a_held_lock_and_a_living_cookie_of_a_stopped_worker(person: Person) -> None:
    """Somebody holds the lock of a worker that is stopped, and somebody lives with its cookie; both are named."""
    person.types("start", "alice", *SLEEPER)
    person.types("stop", "alice")
    registry = read_only(StateDir(person.state).registry)
    cookie = next(record.cookie for record in registry.records() if record.name == "alice")
    registry.close()
    folder = person.state / "workers" / "alice"
    env = {"EVERDECK_COOKIE": cookie, "EVERDECK_WORKER": "alice", "EVERDECK_DIR": str(folder)}
    left = subprocess.Popen(["sleep", "1000"], env=env)
    holder = subprocess.Popen(["flock", str(folder / "lock"), "sleep", "1000"], start_new_session=True)
    try:
        until(lambda: flock.is_held(folder / "lock"))
        report = json.loads(person.types("doctor", "--json", expect=1).stdout)
        named = [problem for problem in report["problems"] if problem.startswith("workers/alice/lock is held by")]
        assert len(named) == 1
        assert f"pid {holder.pid} (" in named[0]
        assert "its record says stopped" in named[0]
        ours = [suspect for suspect in report["suspects"] if suspect["deck"] == str(person.state)]
        assert [(suspect["pid"], suspect["kind"]) for suspect in ours] == [(left.pid, "orphan")]
        assert "cookie of worker 'alice', whose record says stopped" in ours[0]["why"]
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        left.kill()
        holder.wait()
        left.wait()


def _command_of_parent(pid: int) -> bytes:
    """The command line of a process's parent; a pid that is gone has none."""
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        return Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return b""


def test_doctor_sees_the_thirteen_bots(alone: Person, tmp_path: Path) -> None:
    """Copies of one script whose parent is gone are told by likeness, and never ended from here."""
    (tmp_path / "bot.py").write_text("import signal\nprint('ready', flush=True)\nsignal.pause()\n")
    launcher = (
        "import subprocess, sys\n"
        "apart = {'stdout': subprocess.PIPE, 'stderr': subprocess.DEVNULL, 'start_new_session': True}\n"
        "bots = [subprocess.Popen([sys.executable, 'bot.py'], **apart) for _ in range(3)]\n"
        "print(*[bot.pid for bot in bots if bot.stdout.readline()], flush=True)\n"
    )
    script = "import os\nif os.fork() == 0:\n    " + launcher.replace("\n", "\n    ")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    bots = [int(word) for word in done.stdout.split()]
    assert len(bots) == 3
    # Its last words come before its end: the bots are nobody's only when it is gone.
    until(lambda: not any(b"apart = " in _command_of_parent(pid) for pid in bots), "their launcher is gone")
    try:
        shown = alone.types("doctor", "--fix", "--json", input="y\ny\ny\n", expect=None)
        suspects = {suspect["pid"]: suspect for suspect in json.loads(shown.stdout)["suspects"]}
        for pid in bots:
            assert suspects[pid]["kind"] == "likeness"
            assert "one of 3 alike" in suspects[pid]["why"]
            assert Path(f"/proc/{pid}").exists()
    finally:
        for pid in bots:
            with pidfd_of(pid) as pidfd:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def test_apply_shows_a_plan_and_does_it(person: Person, tmp_path: Path) -> None:
    """Add, change, remove, unchanged; a dry run and a broken file change nothing."""
    file = tmp_path / "everdeck.toml"
    file.write_text(
        '[template.t]\ncommand = ["sleep", "1000"]\n[worker.a]\ntemplate = "t"\n[worker.b]\ntemplate = "t"\n'
    )
    person.types("start", "by-hand", *SLEEPER)
    assert (
        person.types("apply", file, "--dry-run").stdout == "+ a\n+ b\n2 to add, 0 to change, 0 to remove, 0 unchanged\n"
    )
    assert len(person.seen()["workers"]) == 1
    person.types("apply", file)
    a = person.worker("a")
    file.write_text(
        '[template.t]\ncommand = ["sleep", "1000"]\n'
        '[worker.a]\ntemplate = "t"\n[worker.c]\ntemplate = "t"\nenv = {X = "1"}\n'
    )
    plan = json.loads(person.types("apply", file, "--json").stdout)["plan"]
    assert {(change["name"], change["action"]) for change in plan} == {
        ("a", "unchanged"),
        ("b", "remove"),
        ("c", "add"),
    }
    assert [worker["name"] for worker in person.seen()["workers"]] == ["a", "by-hand", "c"]
    assert person.worker("a")["pid"] == a["pid"]
    file.write_text('[worker.a]\ncomand = ["sleep"]\n')
    refused = person.types("apply", file, expect=1)
    assert "line 2: worker.a.comand: unknown key 'comand'; did you mean 'command'?" in refused.stderr
    assert [worker["name"] for worker in person.seen()["workers"]] == ["a", "by-hand", "c"]
    person.types("start", "d", "--template", "t", "-e", "X=2")
    assert person.worker("d")["labels"] == {"template": "t"}
    assert "one of the templates: t" in person.types("start", "e", "--template", "u", expect=2).stderr


@pytest.mark.parametrize("whose", ["system", "user"])
def test_a_unit_names_the_file_beside_it_and_systemd_takes_it(alone: Person, tmp_path: Path, whose: str) -> None:
    """everdeck.toml of the directory is in it; a user's unit needs no root and tells about lingering."""
    (tmp_path / "everdeck.toml").write_text("")
    words = ("--user",) if whose == "user" else ("--run-as", "daemon")
    unit = tmp_path / "everdeck.service"
    alone.types("export", "systemd", *words, "-o", unit, cwd=tmp_path)
    text = unit.read_text()
    assert f"up {tmp_path / 'everdeck.toml'} --state" in text
    assert f"WorkingDirectory={tmp_path}\n" in text
    assert ("User=daemon" in text) is (whose == "system")
    assert ("loginctl enable-linger" in text) is (whose == "user")
    assert ("WantedBy=default.target" in text) is (whose == "user")
    assert (f"RequiresMountsFor={alone.state}\n" in text) is (whose == "system")
    alone.types("export", "systemd", "--user", "--run-as", "nobody", expect=2)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    options = ("--user",) if whose == "user" else ()
    verdict = subprocess.run(
        ["systemd-analyze", "verify", *options, str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    assert "everdeck.service" not in verdict.stderr, verdict.stderr


def test_a_unit_of_another_account_gets_its_state_directory_from_systemd(alone: Person) -> None:
    """That account may make none in /var/lib; elsewhere, and where the daemon is root, nothing is made over."""

    def made(state: str, *words: str) -> list[str]:
        text = alone.types("export", "systemd", "--state", state, *words).stdout
        return [line for line in text.splitlines() if line.startswith("StateDirectory")]

    assert made("/var/lib/decks/a b", "--run-as", "daemon") == [
        'StateDirectory="decks/a b"',
        "StateDirectoryMode=0700",
    ]
    assert made("/var/lib/everdeck") == made("/srv/deck", "--run-as", "daemon") == []


def test_a_unit_of_another_account_does_not_begin_where_that_account_may_not_go(alone: Person, tmp_path: Path) -> None:
    """As in /root, where an administrator types it: the unit would end with 200/CHDIR. Sockets in new places too."""
    tmp_path.chmod(0o700)
    words = ("export", "systemd", "--state", "/var/lib/decks/a", "--run-as", "daemon")
    assert "WorkingDirectory=/\n" in alone.types(*words, cwd=tmp_path).stdout
    assert f"WorkingDirectory={tmp_path}\n" in alone.types("export", "systemd", cwd=tmp_path).stdout
    socket = alone.types(*words, "--socket", cwd=tmp_path).stdout
    assert "SocketUser=daemon\n" in socket
    assert "DirectoryMode=0711\n" in socket, "what is missing of the path is made for root, and passed through"


def test_export_writes_what_other_supervisors_read(alone: Person, tmp_path: Path) -> None:
    """A unit that signals only the daemon, and manifests whose workers are never run twice."""
    unit = alone.types("export", "systemd").stdout
    for line in ("Type=notify", "KillMode=process", "NoNewPrivileges=yes", "Restart=always", "Delegate=yes"):
        assert line in unit
    assert f"--state {alone.state}" in unit
    (tmp_path / "t.toml").write_text('[worker.a]\ncommand = ["x"]\n')
    alone.types("export", "kubernetes", tmp_path / "t.toml", "--image", "bots:7", "-o", tmp_path / "k.yaml")
    documents = [json.loads(part) for part in (tmp_path / "k.yaml").read_text().split("---\n")[1:]]
    kinds = [document["kind"] for document in documents]
    assert kinds[:2] == ["Namespace", "ConfigMap"]
    assert kinds.count("StatefulSet") == kinds.count("Lease") == 1
    assert documents[-1]["spec"]["replicas"] == 1
    assert json.loads(documents[-1]["metadata"]["annotations"]["everdeck.dev/spec"])["cwd"] is None
    verify = subprocess.run(["sh", "-c", "command -v systemd-analyze"], capture_output=True, text=True, check=False)
    if verify.returncode == 0:
        (tmp_path / "everdeck.service").write_text(unit)
        subprocess.run(["systemd-analyze", "verify", "--man=no", tmp_path / "everdeck.service"], check=True)


def test_completion_knows_verbs_options_and_names(person: Person) -> None:
    """The scripts ask the command; bash really completes."""
    person.types("start", "alice", *SLEEPER)
    assert person.types("complete", "--", "st").stdout.split() == ["start", "stop"]
    assert person.types("complete", "--", "stop", "al").stdout.split() == ["alice"]
    assert "--detach" in person.types("complete", "--", "up", "--d").stdout
    for shell in ("bash", "zsh", "fish"):
        assert "everdeck complete" in person.types("completion", shell).stdout
    script = person.types("completion", "bash").stdout
    asked = script + 'COMP_WORDS=(everdeck stop al); COMP_CWORD=2; _everdeck; echo "${COMPREPLY[@]}"'
    env = person.env | {"EVERDECK_STATE": str(person.state), "PATH": f"{EVERDECK.parent}:{os.environ['PATH']}"}
    shown = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, env=env, check=True).stdout
    assert shown.strip() == "alice"


# --- in a terminal ----------------------------------------------------------------------------------------------


def test_colours_only_in_a_terminal(person: Person) -> None:
    """A pipe gets plain text; a terminal gets colours, unless NO_COLOR says otherwise."""
    person.types("start", "alice", *SLEEPER)
    assert "\x1b[" not in person.types("ps").stdout
    words = ["--state", str(person.state), "ps"]
    env = {**person.env, "TERM": "xterm"}
    env.pop("NO_COLOR", None)
    in_terminal, _ = pexpect.run(f"{EVERDECK} {' '.join(words)}", env=env, withexitstatus=True)
    assert b"\x1b[32mrunning" in in_terminal
    plain, _ = pexpect.run(f"{EVERDECK} {' '.join(words)}", env={**env, "NO_COLOR": "1"}, withexitstatus=True)
    assert b"\x1b[" not in plain


def test_stop_all_shows_its_progress_and_rm_all_asks_in_a_terminal(person: Person, tmp_path: Path) -> None:
    """Many workers have a progress display; removing all of them asks first."""
    workers = "".join(f'[worker.w{n:02}]\ncommand = ["sleep", "1000"]\n' for n in range(30))
    (tmp_path / "t.toml").write_text(workers)
    person.types("apply", tmp_path / "t.toml")
    env = {**person.env, "TERM": "xterm"}
    shown, code = pexpect.run(f"{EVERDECK} --state {person.state} stop --all", env=env, withexitstatus=True, timeout=60)
    assert code == 0
    assert b"/30" in shown
    assert b"30 stopped" in shown
    asking = pexpect.spawn(str(EVERDECK), ["--state", str(person.state), "rm", "--all"], env=env, timeout=60)
    asking.expect("with logs and data")
    asking.sendline("n")
    asking.expect(pexpect.EOF)
    asking.close()
    assert asking.exitstatus == 1
    assert len(person.seen()["workers"]) == 30


def test_top_shows_the_deck_and_acts_on_a_key(person: Person) -> None:
    """The live view starts in a real terminal, names the workers, stops one on `x` and `y`, and leaves on `q`."""
    pytest.importorskip("textual")
    person.types("start", "alice", *SLEEPER)
    env = {**person.env, "TERM": "xterm-256color"}
    view = pexpect.spawn(
        str(EVERDECK),
        ["--state", str(person.state), "top", "--interval", "0.2"],
        env=env,
        timeout=60,
        dimensions=(40, 120),
    )
    try:
        view.expect("alice")
        view.expect("running")
        view.send("x")
        view.expect("Stop alice")
        view.send("y")
        until(lambda: person.worker("alice")["state"] == "stopped")
        view.send("q")
        view.expect(pexpect.EOF)
    finally:
        view.close(force=True)


def test_a_reader_that_has_seen_enough_is_no_error(person: Person) -> None:
    """``everdeck events | head -1`` ends quietly."""
    person.types("start", "alice", *SLEEPER)
    shown = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {EVERDECK} --state {person.state} events --json | head -1"],
        capture_output=True,
        text=True,
        env=person.env,
        check=False,
    )
    assert json.loads(shown.stdout)["id"] == 1
    assert shown.stderr == ""


# --- the demo ---------------------------------------------------------------------------------------------------


def test_the_demo_tour_runs_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Three users, a kill -9, the same processes afterwards, and an empty machine."""
    person = Person(tmp_path / "unused", TMPDIR=str(tmp_path))
    began = time.monotonic()
    shown = person.types("demo", stdin=subprocess.DEVNULL).stdout
    assert "Nothing was lost, and nothing runs twice." in shown
    assert "not supervised" in shown
    assert "its token is in" in shown  # a link with a token is for terminals
    assert list(tmp_path.glob("everdeck-demo-*")) == []
    assert not _processes_with(str(tmp_path))
    assert time.monotonic() - began < PATIENCE_SECONDS


def test_the_demo_in_a_terminal_waits_and_cleans_up_after_ctrl_c(tmp_path: Path) -> None:
    """Interrupted in the middle, it still leaves nothing behind."""
    person = Person(tmp_path / "unused", TMPDIR=str(tmp_path), TERM="xterm")
    tour = pexpect.spawn(str(EVERDECK), ["demo", "--no-page"], env=person.env, timeout=60)
    try:
        tour.expect("Press Enter to go on")
        tour.sendline("")
        tour.expect("Press Enter to kill -9 the owner")
        tour.sendintr()
        tour.expect(pexpect.EOF)
    finally:
        tour.close(force=True)
    assert list(tmp_path.glob("everdeck-demo-*")) == []
    assert not _processes_with(str(tmp_path))


@pytest.mark.parametrize(
    ("step", "how"),
    [
        ("everdeck up", signal.SIGKILL),
        ("Press Enter to kill -9 the owner", signal.SIGTERM),
        ("Press Enter to start a new owner", signal.SIGKILL),
        ("Press Enter to go on", None),
    ],
)
def test_whatever_kills_the_demo_it_leaves_nothing(step: str, how: signal.Signals | None, tmp_path: Path) -> None:
    """In the middle of a command, with a daemon, without one, and by closing the terminal (None)."""
    person = Person(tmp_path / "unused", TMPDIR=str(tmp_path), TERM="xterm")
    tour = pexpect.spawn(str(EVERDECK), ["demo", "--no-page"], env=person.env, timeout=PATIENCE_SECONDS)
    try:
        while tour.expect_exact([step, "Press Enter"]) == 1:
            tour.sendline("")
        if how is None:
            tour.ptyproc.fileobj.close()
            tour.closed = tour.ptyproc.closed = True
            tour.wait()
        else:
            tour.kill(how)
        until(lambda: not list(tmp_path.glob("everdeck-demo-*")), "its directory stayed")
        until(lambda: not _processes_with(str(tmp_path)), "something of it still runs")
    finally:
        tour.close(force=True)


def test_nobody_else_is_swept_away(tmp_path: Path) -> None:
    """The verb that cleans up after the demo touches only a demo's directory."""
    (tmp_path / "precious").mkdir()
    Person(tmp_path / "unused").types("sweep", tmp_path / "precious", expect=1, stdin=subprocess.DEVNULL)
    assert (tmp_path / "precious").is_dir()


def _processes_with(place: str) -> list[str]:
    shown = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in shown.splitlines() if place in line and "everdeck" in line]
