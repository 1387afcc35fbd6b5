-- From version 1 to 2: which deaths an item has seen that nobody explained, and a name for the file itself.

ALTER TABLE everdeck_item ADD COLUMN kills INTEGER NOT NULL DEFAULT 0;

-- What was marked as running by version 1 was in flight when it ended; the ledger tells that now.
UPDATE everdeck_item SET state = 0 WHERE state = 1;

CREATE TABLE everdeck_file (
    id    INTEGER NOT NULL,           -- random: a ledger that names another file is not about this one
    syncs INTEGER NOT NULL DEFAULT 0  -- changed in order to have something to sync
) STRICT;

UPDATE everdeck_feed_version SET version = 2;
