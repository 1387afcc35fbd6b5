-- What readers in other processes add to a feed's file. Made by whoever opens it first; never changed afterwards.

-- A program that takes messages. It is gone when its boot, its process or its lease is.
CREATE TABLE IF NOT EXISTS everdeck_reader (
    id          TEXT    PRIMARY KEY,
    boot_id     TEXT    NOT NULL,
    pid_space   INTEGER NOT NULL,             -- the pid namespace: a pid means nothing in another one
    pid         INTEGER NOT NULL,
    start_ticks INTEGER NOT NULL,
    lease_until REAL    NOT NULL              -- seconds since boot; the wall clock may step
) STRICT;

-- Who handles which item now. An item that is running and has no claim belongs to nobody.
CREATE TABLE IF NOT EXISTS everdeck_claim (
    seq    INTEGER PRIMARY KEY,
    reader TEXT    NOT NULL
) STRICT;

-- What a satellite tells of itself: account, connection, last contact, error.
CREATE TABLE IF NOT EXISTS everdeck_fact (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;

-- Which message was promised under which request id: who asks again because it got no answer gets that one. Kept an hour.
CREATE TABLE IF NOT EXISTS everdeck_promise (
    request TEXT    PRIMARY KEY,
    seq     INTEGER NOT NULL,
    at      REAL    NOT NULL
) STRICT;

CREATE INDEX IF NOT EXISTS everdeck_item_lane ON everdeck_item (stream, key, seq) WHERE state < 2;

-- Messages of which the other side wants to hear when they are done.
CREATE TABLE IF NOT EXISTS everdeck_after (id TEXT PRIMARY KEY) STRICT;
CREATE INDEX IF NOT EXISTS everdeck_item_id ON everdeck_item (id);

-- The last thousand that are done, so that a person can have one handled again. A dead letter that is dropped is not.
CREATE TABLE IF NOT EXISTS everdeck_done (
    seq       INTEGER PRIMARY KEY,
    stream    INTEGER NOT NULL,
    id        ANY     NOT NULL,
    key       TEXT,
    payload   BLOB    NOT NULL,
    stored_at REAL    NOT NULL,
    attempts  INTEGER NOT NULL
) STRICT;
CREATE TRIGGER IF NOT EXISTS everdeck_item_done AFTER DELETE ON everdeck_item WHEN old.state != 2
BEGIN
    INSERT OR REPLACE INTO everdeck_done VALUES
        (old.seq, old.stream, old.id, old.key, old.payload, old.stored_at, old.attempts);
    DELETE FROM everdeck_done WHERE seq <= old.seq - 1000;
END;
