-- From version 1 to 2: which deaths an item has seen that nobody explained, and a name for the file itself.

ALTER TABLE everdeck_item ADD COLUMN kills INTEGER NOT NULL DEFAULT 0;

-- What was marked as running by version 1 was in flight when it ended; the ledger tells that now.
UPDATE everdeck_item SET state = 0 WHERE state = 1;

CREATE TABLE everdeck_file (
    id    INTEGER NOT NULL,           -- random: a ledger that names another file is not about this one
    syncs INTEGER NOT NULL DEFAULT 0  -- changed in order to have something to sync
) STRICT;

-- A message that a handler waits for: whose it is, which one of that item's, and what the other side answered. Kept as
-- state 3 (sent) until the item is finished, so that an attempt that is repeated does not send it again.
ALTER TABLE everdeck_outbox ADD COLUMN item INTEGER;
ALTER TABLE everdeck_outbox ADD COLUMN mark TEXT;
ALTER TABLE everdeck_outbox ADD COLUMN result BLOB;
CREATE INDEX everdeck_outbox_item ON everdeck_outbox (item) WHERE item IS NOT NULL;

-- What a library remembers between updates (states of conversations, data of users): written with the ack.
CREATE TABLE everdeck_memory (
    kind  TEXT NOT NULL,
    key   TEXT NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (kind, key)
) STRICT, WITHOUT ROWID;

UPDATE everdeck_feed_version SET version = 2;
