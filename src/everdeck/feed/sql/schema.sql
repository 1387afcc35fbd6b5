-- The feed's tables, version 1. The prefix keeps them apart from the user's own tables in the same file.

-- One row per upstream account.
CREATE TABLE everdeck_stream (
    id         INTEGER PRIMARY KEY,
    name       TEXT    NOT NULL UNIQUE,
    phase      TEXT    NOT NULL CHECK (phase IN ('initialising', 'live')),
    cursor     TEXT,                          -- JSON: where to ask next
    confirmed  INTEGER NOT NULL DEFAULT 0,    -- 1: an answer to a poll at the cursor was seen
    floor      INTEGER NOT NULL DEFAULT 0,    -- upstream has forgotten every id below it, in this epoch
    epoch      INTEGER NOT NULL DEFAULT 0,    -- how often the ids have started again
    stored_at  REAL    NOT NULL DEFAULT 0,    -- when the last record was stored (Unix time)
    last_batch INTEGER NOT NULL DEFAULT 0,    -- first seq of the last batch: its ids are never forgotten
    done       INTEGER NOT NULL DEFAULT 0     -- how many items were finished, ever
) STRICT;

-- Which ids were stored; outlives the items, for as long as upstream could deliver them again.
CREATE TABLE everdeck_seen (
    seq       INTEGER PRIMARY KEY,
    stream    INTEGER NOT NULL,
    id        ANY     NOT NULL,
    epoch     INTEGER NOT NULL,
    digest    BLOB,
    stored_at REAL    NOT NULL
) STRICT;
CREATE UNIQUE INDEX everdeck_seen_id ON everdeck_seen (stream, id, epoch);

-- What is still to be done, is being done, or was set aside. A finished item has no row.
CREATE TABLE everdeck_item (
    seq       INTEGER PRIMARY KEY,            -- the order of arrival, and the number people see
    stream    INTEGER NOT NULL,
    id        ANY     NOT NULL,
    key       TEXT,
    payload   BLOB    NOT NULL,
    stored_at REAL    NOT NULL,
    state     INTEGER NOT NULL DEFAULT 0,     -- 0 waiting, 1 running, 2 dead
    attempts  INTEGER NOT NULL DEFAULT 0,     -- counted before the handler runs
    crashes   INTEGER NOT NULL DEFAULT 0,     -- attempts that ended with the process
    due_at    REAL    NOT NULL DEFAULT 0,     -- not before (Unix time)
    error     TEXT,
    died_at   REAL,
    told      INTEGER NOT NULL DEFAULT 0      -- 1: the deck has heard that it is dead
) STRICT;
CREATE INDEX everdeck_item_state ON everdeck_item (stream, seq) WHERE state != 0;

-- Replies that were promised in a transaction and are sent afterwards.
CREATE TABLE everdeck_outbox (
    seq      INTEGER PRIMARY KEY AUTOINCREMENT,
    outbox   TEXT    NOT NULL,
    key      TEXT,
    payload  BLOB    NOT NULL,
    put_at   REAL    NOT NULL,
    state    INTEGER NOT NULL DEFAULT 0,      -- 0 waiting, 1 being sent, 2 dead
    attempts INTEGER NOT NULL DEFAULT 0,
    due_at   REAL    NOT NULL DEFAULT 0,
    error    TEXT,
    died_at  REAL
) STRICT;
CREATE INDEX everdeck_outbox_order ON everdeck_outbox (outbox, seq);

CREATE TABLE everdeck_feed_version (version INTEGER NOT NULL) STRICT;
INSERT INTO everdeck_feed_version VALUES (1);
