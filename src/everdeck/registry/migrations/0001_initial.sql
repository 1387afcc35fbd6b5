-- The registry as it began: what is wanted of each worker, the note of who it was, and what happened.

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE workers (
    name          TEXT PRIMARY KEY,
    spec          BLOB NOT NULL,               -- WorkerSpec as JSON, secret values left out
    desired       TEXT NOT NULL,               -- running | stopped
    phase         TEXT NOT NULL,               -- a State
    cookie        TEXT NOT NULL,               -- of the last start
    boot_id       TEXT,                        -- with pid, start_ticks, pidfd_inode: the identity of the leader
    pid           INTEGER,
    start_ticks   INTEGER,
    pidfd_inode   INTEGER,
    cgroup        TEXT,                        -- the worker's own cgroup directory once its tree is inside
    proxy_lock    INTEGER NOT NULL DEFAULT 0,  -- taken over from elsewhere: the owner holds the lock for it
    started_at    REAL,                        -- wall clock, for people
    port          INTEGER,
    exit          BLOB,                        -- the last Exit as JSON
    restarts      INTEGER NOT NULL DEFAULT 0,
    crashes       INTEGER NOT NULL DEFAULT 0,
    streak        INTEGER NOT NULL DEFAULT 0,  -- ends in a row without a stable time between them
    crash_times   TEXT NOT NULL DEFAULT '[]',  -- seconds since boot, of the boot in timers_boot_id
    backoff_until REAL,                        -- seconds since boot, of the boot in timers_boot_id
    timers_boot_id TEXT,
    adopted       INTEGER NOT NULL DEFAULT 0,
    ready         INTEGER NOT NULL DEFAULT 0   -- said READY=1 since it was started
) WITHOUT ROWID;

CREATE TABLE events (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,  -- grows by one, without gaps, and is never used again
    at     REAL NOT NULL,
    worker TEXT,
    kind   TEXT NOT NULL,
    detail BLOB NOT NULL
);

CREATE INDEX events_by_worker ON events (worker, id);
