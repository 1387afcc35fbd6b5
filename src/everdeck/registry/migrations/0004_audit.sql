-- What somebody asked for is kept by a bound of its own, so that no worker can push it out by being loud.
ALTER TABLE events ADD COLUMN asked INTEGER NOT NULL DEFAULT 0;

CREATE INDEX events_asked ON events (id) WHERE asked = 1;
