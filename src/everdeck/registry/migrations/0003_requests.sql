-- Requests of members and their outcomes: a verb that is asked again after the owner changed is answered, not repeated.

CREATE TABLE requests (
    id     TEXT NOT NULL,
    worker TEXT NOT NULL,
    event  INTEGER,              -- the event that says it was done; NULL: begun, and the owner may have died in it
    at     REAL NOT NULL,
    PRIMARY KEY (id, worker)
) WITHOUT ROWID;

CREATE INDEX requests_by_age ON requests (at);
