"""The state directory: who owns it, and what lies where.

``deck.lock`` is held for as long as the owner lives, whichever way it dies; its content is the owner's pid, for people
and for :class:`everdeck.errors.DeckOwned`. ``workers/NAME`` belongs to one worker each. A directory on its way out is
renamed first to a name that no worker can have (``~`` is outside the alphabet), so a removal that was interrupted is
finished by the next owner and never mistaken for a worker.
"""

import contextlib
import errno
import json
import os
import pwd
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from everdeck import disk
from everdeck.errors import DeckOwned, NameRefused, StateDirRefused
from everdeck.kernel import descriptors, flock
from everdeck.kernel.lifeline import Lifeline, forget_in_forks
from everdeck.model import WorkerName, worker_name
from everdeck.statedir import LOCK, StateDir

_REMOVING: Final = "removing~"
HANDED_OVER_ENV: Final = "EVERDECK_HANDED_OVER"


@dataclass(frozen=True, slots=True)
class Inherited:
    """What was carried over by an exec in place, or handed on by the owner before; empty in an ordinary start."""

    lock_fd: int | None = None
    notify_fd: int | None = None
    lifelines: dict[str, int] = field(default_factory=dict)
    guardian: dict[str, int] | None = None
    listener_fd: int | None = None


class DeckHome:
    """The directory of one deck."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        places = StateDir(state_dir)
        self.workers_dir = places.workers
        self.registry_path = places.registry
        self.lock_path = places.lock
        self.socket_path = places.socket
        self._lock_fd: int | None = None

    def open(self, handed_on: Inherited | None = None, *, name_owner: bool = True) -> Inherited:
        """Make the directory if need be and take its lock, or say who has it.

        To name the owner may mean a look at all of /proc; who tries again and again does without.
        """
        make_state_dir(self.state_dir)
        try:
            self.workers_dir.mkdir(mode=0o700, exist_ok=True)
        except OSError as err:
            raise StateDirRefused(f"{self.state_dir}: {err.strerror} (errno {err.errno})") from err
        inherited = handed_on or self._inherited()
        self._lock_fd = inherited.lock_fd if inherited.lock_fd is not None else flock.take(self.lock_path)
        if self._lock_fd is None:
            raise DeckOwned(str(self.state_dir), owner_pid(self.state_dir) if name_owner else None)
        # When we are killed this is let go of before anything that takes the kernel its time.
        self._lock_fd = descriptors.raised(self._lock_fd)
        try:
            note = f"{os.getpid()}\n".encode()
            os.pwrite(self._lock_fd, note, 0)
            if os.fstat(self._lock_fd).st_size != len(note):  # a file system may wait for its journal to do this
                os.ftruncate(self._lock_fd, len(note))
        except OSError as err:
            if err.errno not in {errno.ENOSPC, errno.EDQUOT}:  # the pid is for people; the lock itself needs no space
                self.close()
                raise StateDirRefused(f"{self.lock_path}: {err.strerror}") from err
        return inherited

    def close(self) -> None:
        """Let go of the lock: somebody else may own the deck now."""
        if self._lock_fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock_fd, 0)
            os.close(self._lock_fd)
            self._lock_fd = None
            with contextlib.suppress(OSError):
                os.utime(self.lock_path)  # who waits for the lock hears of it; see everdeck.kernel.vacancy

    @property
    def lock_fd(self) -> int:
        """The descriptor that holds the deck; raises when this process does not."""
        if self._lock_fd is None:
            raise StateDirRefused(f"{self.state_dir}: not owned by this process")
        return self._lock_fd

    def give_away(self) -> None:
        """Somebody else has a copy of the lock's descriptor: close ours, and leave the note to the new owner."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def close_in_fork(self) -> None:
        """In a forked copy of the owner: its descriptors would keep the deck and its workers locked.

        Also the lock of a worker that another thread is just starting, which nobody has noted anywhere yet: so look
        at what is open, not at what is known.
        """
        self._lock_fd = None
        workers = f"{os.path.realpath(self.workers_dir)}/"
        deck_lock = os.path.realpath(self.lock_path)
        for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all we want
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{entry}")  # noqa: PTH115 - one system call per descriptor
                if target == deck_lock or (target.startswith(workers) and target.endswith(f"/{LOCK}")):
                    os.close(int(entry))

    # --- workers ------------------------------------------------------------------------------------------------

    def worker_names(self) -> list[WorkerName]:
        """Every worker that has a directory, whether or not the registry knows it."""
        names = []
        for entry in os.listdir(self.workers_dir):  # noqa: PTH208 - names are all we want
            with contextlib.suppress(NameRefused):
                names.append(worker_name(entry))
        return names

    def set_aside(self, name: WorkerName) -> Path | None:
        """The first step of a removal, in one move: from here on the directory is no worker's. Where it is now."""
        aside = self.workers_dir / f"{_REMOVING}{name}~{os.urandom(4).hex()}"
        try:
            (self.workers_dir / name).rename(aside)
        except FileNotFoundError:
            return None
        except OSError as err:
            raise StateDirRefused(f"{self.workers_dir / name}: {err.strerror}") from err
        return aside

    def clear(self, aside: Path) -> None:
        """The last step: remove what was set aside. What cannot be removed now is tried again by the next owner."""
        with contextlib.suppress(OSError):
            disk.remove_tree(aside)

    def clear_set_aside(self) -> None:
        """The same for all that earlier owners have set aside."""
        for entry in os.listdir(self.workers_dir):  # noqa: PTH208
            if entry.startswith(_REMOVING):
                self.clear(self.workers_dir / entry)

    def removals_begun(self) -> list[str]:
        """Names whose removal an earlier owner began: their directory is set aside, their record may be left."""
        begun = []
        for entry in os.listdir(self.workers_dir):  # noqa: PTH208
            if entry.startswith(_REMOVING):
                name = entry.removeprefix(_REMOVING).rpartition("~")[0]
                if not (self.workers_dir / name).exists():
                    begun.append(name)
        return begun

    def discard_unstarted(self, name: WorkerName) -> None:
        """A directory without a lock file and without a record: its first start never got as far as the intent."""
        with contextlib.suppress(OSError):
            disk.remove_tree(self.workers_dir / name)

    # --- exec in place ------------------------------------------------------------------------------------------

    def hand_over(
        self, lifelines: dict[str, int], notify_fd: int, listener_fd: int, guardian: dict[str, int] | None
    ) -> dict[str, str]:
        """Let these descriptors survive an exec, and say so in the environment."""
        if self._lock_fd is None:
            raise StateDirRefused(f"{self.state_dir}: not owned by this process")
        for fd in (self._lock_fd, notify_fd, listener_fd, *lifelines.values()):
            os.set_inheritable(fd, True)  # noqa: FBT003 - the name of the argument is the function's
        told = {
            "pid": os.getpid(),
            "state_dir": str(self.state_dir),
            "lock_fd": self._lock_fd,
            "notify_fd": notify_fd,
            "listener_fd": listener_fd,
            "lifelines": lifelines,
            "guardian": guardian,
        }
        return {HANDED_OVER_ENV: json.dumps(told)}

    def lifeline_from(self, write_fd: int) -> Lifeline:
        """A lifeline of the image before: only its write end is ours."""
        os.set_inheritable(write_fd, False)  # noqa: FBT003
        line = Lifeline(-1, write_fd)
        forget_in_forks(line)
        return line

    def _inherited(self) -> Inherited:
        text = os.environ.pop(HANDED_OVER_ENV, "")
        if not text:
            return Inherited()
        told = json.loads(text)
        # A variable that leaked into another process speaks of descriptors that are not there.
        if told["pid"] != os.getpid() or told["state_dir"] != str(self.state_dir):
            return Inherited()
        listener_fd: int | None = told.get("listener_fd")  # an image of an earlier release did not hand it on
        for fd in (told["lock_fd"], told["notify_fd"], *([] if listener_fd is None else [listener_fd])):
            os.set_inheritable(fd, False)  # noqa: FBT003
        return Inherited(told["lock_fd"], told["notify_fd"], told["lifelines"], told["guardian"], listener_fd)


def make_state_dir(state_dir: Path) -> None:
    """Make the directory if need be; refuse one in which somebody else could put his own files in place of ours.

    For root that would be everybody's way to root, so all directories above are looked at as well. Others may pass
    through the directory (workers of another account need it), never list, read or write.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            facts = os.fstat(fd)
            if facts.st_uid != os.geteuid():
                raise StateDirRefused(
                    f"{state_dir}: belongs to {_account_name(facts.st_uid)}, and this is "
                    f"{_account_name(os.geteuid())}; give it to the account that owns the deck, or use another one"
                )
            if facts.st_mode & 0o066:
                os.fchmod(fd, facts.st_mode & 0o711)
        finally:
            os.close(fd)
        places = StateDir(state_dir)
        for path in (places.registry, places.workers):
            if path.is_symlink():
                raise StateDirRefused(f"{path}: a link where our own file belongs; remove it")
        if os.geteuid() == 0:
            for above in Path(os.path.realpath(state_dir)).parents:
                _refuse_unsafe_for_root(above, state_dir)
    except OSError as err:
        raise StateDirRefused(f"{state_dir}: {err.strerror} (errno {err.errno})") from err


def _refuse_unsafe_for_root(above: Path, state_dir: Path) -> None:
    facts = above.stat()
    if facts.st_uid != 0:
        why = f"belongs to {_account_name(facts.st_uid)}, who could replace what is in it"
    elif facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX:
        why = "may be written by everybody"
    else:
        return
    raise StateDirRefused(
        f"{state_dir}: no place for a deck that root owns, because {above} {why}; "
        f"use a directory such as /var/lib/everdeck"
    )


def _account_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def owner_pid(state_dir: Path) -> int | None:
    """Who owns the deck, by the note in the lock file; None if nobody does or the note cannot be read."""
    path = StateDir(state_dir).lock
    if not flock.is_held(path):
        return None
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    holders = flock.holders(path)
    return holders[0] if holders else None
