"""Details of events, and how the command line, the daemon's log and the page say them."""

WORDINGS: tuple[tuple[dict[str, object], str], ...] = (
    ({}, ""),
    ({"pid": 12, "exit": {"kind": "killed", "signal": 15}}, "pid 12, killed by SIGTERM"),
    ({"exit": {"kind": "exited", "code": 3}, "uptime_seconds": 12.3456}, "exit code 3, after 12.35 s"),
    ({"exit": {"kind": "killed", "signal": 64}}, "killed by SIGRTMAX"),
    ({"exit": {"kind": "killed", "signal": 99}}, "killed by signal 99"),
    ({"exit": {"kind": "killed", "signal": 9, "oom": True}}, "killed by SIGKILL (out of memory)"),
    ({"exit": {"kind": "unknown"}, "pid": None}, "ended unseen"),
    ({"delay_seconds": 1.0, "grace_seconds": 5}, "next start in 1 s, grace 5 s"),
    ({"archives": ["a.log", "b.log"], "pruned": [], "bytes": 7}, "archives a.log, b.log, bytes 7"),
    ({"survivors": [{"pid": 4, "command": "sh"}, {"pid": 5, "command": "a b"}]}, "survivors 4 (sh), 5 (a b)"),
    ({"pids": [1, 2, 3, 4, 5, 6, 7]}, "pids 1, 2, 3, 4, 5 and 2 more"),
    ({"reason": "HTTP 500 from http://x/", "adopted": True, "bound": False}, "HTTP 500 from http://x/, adopted"),
    ({"by": {"uid": 0, "pid": 7}, "error": "no"}, "by uid 0, pid 7, no"),
    ({"old_pid": 0, "text": ""}, "old pid 0"),
)
