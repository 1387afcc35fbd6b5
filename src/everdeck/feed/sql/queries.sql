-- Every statement of the feed, by name. Loaded by everdeck.feed.store.

-- name: version
SELECT max(version) FROM everdeck_feed_version;

-- name: file_id
SELECT id FROM everdeck_file;

-- name: file_id_set
INSERT INTO everdeck_file (id) VALUES (?);

-- name: stream
SELECT id, cursor, confirmed, floor, epoch, stored_at, done FROM everdeck_stream WHERE name = ?;

-- name: stream_add
INSERT INTO everdeck_stream (name, phase) VALUES (?, ?);

-- name: stream_advance
UPDATE everdeck_stream
SET phase = 'live', cursor = ?, confirmed = ?, floor = ?, epoch = ?, stored_at = ?
WHERE id = ?;

-- name: stream_done
UPDATE everdeck_stream SET done = done + ? WHERE id = ?;

-- name: last_seq
SELECT max((SELECT coalesce(max(seq), 0) FROM everdeck_seen), (SELECT coalesce(max(seq), 0) FROM everdeck_item));

-- name: seen
SELECT id, epoch, digest FROM everdeck_seen WHERE stream = ? AND id IN (SELECT value FROM json_each(?));

-- name: seen_oldest
SELECT s.seq, s.stored_at, s.seq >= t.last_batch FROM everdeck_seen AS s JOIN everdeck_stream AS t ON t.id = s.stream
ORDER BY s.seq;

-- name: seen_forget
DELETE FROM everdeck_seen WHERE seq IN (SELECT value FROM json_each(?));

-- name: batch_add
-- See at_once.sql, as for the next three.
INSERT INTO everdeck_batch VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: batch_add_plain
INSERT INTO everdeck_plain_batch VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: acks_add
INSERT INTO everdeck_ack VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: acks_add_plain
INSERT INTO everdeck_plain_ack VALUES (?, ?, ?);

-- name: item_add_dead
INSERT INTO everdeck_item (seq, stream, id, key, payload, stored_at, state, attempts, error, died_at)
VALUES (?, ?, ?, ?, ?, ?, 2, ?, ?, ?);

-- name: items_waiting
SELECT seq, key, due_at, crashes, kills FROM everdeck_item WHERE stream = ? AND state = 0 ORDER BY seq;

-- name: items_charged
SELECT seq, stream, crashes, kills FROM everdeck_item WHERE seq IN (SELECT value FROM json_each(?)) AND state = 0;

-- name: item_charge
UPDATE everdeck_item SET crashes = ?, kills = ?, attempts = attempts + 1, error = coalesce(?, error) WHERE seq = ?;

-- name: items_convicted
UPDATE everdeck_item SET state = 2, died_at = ?, told = 0,
    error = coalesce(error || '; ', '') || 'the process died ' || (crashes + kills) || ' times while it was in work'
WHERE stream = ? AND state = 0 AND (crashes >= ? OR kills >= ?)
RETURNING seq, id, key, attempts, crashes + kills, error;

-- name: items_finished
DELETE FROM everdeck_item WHERE seq IN (SELECT value FROM json_each(?)) AND state = 0 RETURNING stream;

-- name: items_take
-- One row: a statement gives the interpreter's lock away once per row.
SELECT json_group_array(json_array(seq, id, key, hex(payload), attempts, stored_at, crashes + kills))
FROM everdeck_item WHERE seq IN (SELECT value FROM json_each(?)) AND state = 0;

-- name: items_done
DELETE FROM everdeck_item WHERE seq IN (SELECT value FROM json_each(?));

-- name: item_done
DELETE FROM everdeck_item WHERE seq = ?;

-- name: item_retry_later
UPDATE everdeck_item SET due_at = ?, error = ?, attempts = ? WHERE seq = ? AND state = 0;

-- name: item_set_aside
UPDATE everdeck_item SET state = 2, error = ?, died_at = ?, told = 0, attempts = ? WHERE seq = ? AND state = 0;

-- The next five are for readers in other processes, who have no ledger: they mark what they work on in the row.

-- name: items_taken
UPDATE everdeck_item SET state = 1, attempts = attempts + 1
WHERE seq IN (SELECT value FROM json_each(?)) AND state = 0;

-- name: item_retry
UPDATE everdeck_item SET state = 0, due_at = ?, error = ? WHERE seq = ?;

-- name: item_hand_back
UPDATE everdeck_item SET state = 0, attempts = attempts - 1, due_at = ? WHERE seq = ? AND state = 1;

-- name: item_crashed_out
UPDATE everdeck_item SET state = 2, crashes = crashes + 1, died_at = ?, error = coalesce(error || '; ', '') || ?, told = 0
WHERE seq = ?
RETURNING seq, id, key, attempts, error;

-- name: item_dead
UPDATE everdeck_item SET state = 2, error = ?, died_at = ?, told = 0 WHERE seq = ?;

-- name: items_untold
SELECT seq, id, key, attempts, crashes, error FROM everdeck_item WHERE stream = ? AND state = 2 AND told = 0 LIMIT 100;

-- name: item_told
UPDATE everdeck_item SET told = 1 WHERE seq = ?;

-- name: waiting_count
SELECT count(*) FROM everdeck_item WHERE stream = ? AND state = 0;

-- name: dead_count
SELECT count(*) FROM everdeck_item WHERE stream = ? AND state = 2;

-- name: dead_list
SELECT i.seq, t.name, i.id, i.key, i.attempts, i.crashes + i.kills, i.error, i.stored_at, i.died_at, i.payload
FROM everdeck_item AS i JOIN everdeck_stream AS t ON t.id = i.stream
WHERE i.state = 2 AND (? IS NULL OR t.name = ?) AND (? IS NULL OR i.seq = ?)
ORDER BY i.seq LIMIT ?;

-- name: dead_retry
UPDATE everdeck_item SET state = 0, attempts = 0, crashes = 0, kills = 0, due_at = 0 WHERE seq = ? AND state = 2;

-- name: dead_expire
DELETE FROM everdeck_item WHERE state = 2 AND died_at < ?;

-- name: outbox_dead_expire
DELETE FROM everdeck_outbox WHERE state = 2 AND died_at < ?;

-- name: dead_drop
DELETE FROM everdeck_item WHERE seq = ? AND state = 2;

-- name: outbox_put
INSERT INTO everdeck_outbox (outbox, key, payload, put_at) VALUES (?, ?, ?, ?);

-- name: outbox_put_for
INSERT INTO everdeck_outbox (outbox, key, payload, put_at, item, mark) VALUES (?, ?, ?, ?, ?, ?);

-- name: outbox_found
SELECT seq, state, result FROM everdeck_outbox WHERE outbox = ? AND item = ? AND mark = ?;

-- name: outbox_waiting
SELECT seq, key, due_at FROM everdeck_outbox WHERE outbox = ? AND state < 2 ORDER BY seq;

-- name: outbox_interrupted
-- At most once: what was on the wire when the process died is not sent again; a person can still decide.
UPDATE everdeck_outbox SET state = 2, error = 'on the wire when the process died; at most once', died_at = ?
WHERE outbox = ? AND state = 1;

-- name: outbox_sending
UPDATE everdeck_outbox SET state = 1, attempts = attempts + 1 WHERE seq = ? AND state < 2
RETURNING key, payload, attempts;

-- name: outbox_sent
DELETE FROM everdeck_outbox WHERE seq = ?;

-- name: outbox_kept
UPDATE everdeck_outbox SET state = 3, result = ?, put_at = ? WHERE seq = ?;

-- name: outbox_item_of
SELECT item FROM everdeck_outbox WHERE seq = ? AND item IS NOT NULL;

-- name: outbox_item_done
DELETE FROM everdeck_outbox WHERE item = ? AND state = 3;

-- name: outbox_kept_expire
DELETE FROM everdeck_outbox WHERE state = 3 AND put_at < ?;

-- name: outbox_retry
UPDATE everdeck_outbox SET state = 0, due_at = ?, error = ?, attempts = attempts - ? WHERE seq = ?;

-- name: outbox_dead
UPDATE everdeck_outbox SET state = 2, error = ?, died_at = ? WHERE seq = ?;

-- name: outbox_count
SELECT coalesce(sum(state < 2), 0), coalesce(sum(state = 2), 0) FROM everdeck_outbox WHERE outbox = ?;

-- name: outbox_dead_list
SELECT seq, outbox, key, attempts, error, put_at, died_at, payload FROM everdeck_outbox
WHERE state = 2 AND (? IS NULL OR outbox = ?) AND (? IS NULL OR seq = ?) ORDER BY seq LIMIT ?;

-- name: outbox_dead_retry
UPDATE everdeck_outbox SET state = 0, attempts = 0, due_at = 0 WHERE seq = ? AND state = 2;

-- name: outbox_dead_drop
DELETE FROM everdeck_outbox WHERE seq = ? AND state = 2;

-- name: reader_put
INSERT INTO everdeck_reader (id, boot_id, pid_space, pid, start_ticks, lease_until) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET lease_until = excluded.lease_until;

-- name: reader_drop
DELETE FROM everdeck_reader WHERE id = ?;

-- name: readers
SELECT id, boot_id, pid_space, pid, start_ticks, lease_until FROM everdeck_reader WHERE id != ?;

-- name: claims_of
SELECT c.seq, i.attempts FROM everdeck_claim AS c JOIN everdeck_item AS i ON i.seq = c.seq
WHERE c.reader = ? AND i.state = 1;

-- name: claims_drop
DELETE FROM everdeck_claim WHERE reader = ?;

-- name: claim_add
INSERT INTO everdeck_claim (seq, reader) VALUES (?, ?);

-- name: claim_drop
DELETE FROM everdeck_claim WHERE seq = ? AND reader = ?;

-- name: claim_left_behind
UPDATE everdeck_item SET state = 0, crashes = crashes + 1, due_at = 0, attempts = min(attempts, ?) WHERE seq = ?;

-- name: items_unclaimed
UPDATE everdeck_item SET state = 0 WHERE state = 1 AND seq NOT IN (SELECT seq FROM everdeck_claim);

-- name: items_claimable
-- The first of each conversation of which none is being handled.
SELECT i.seq, i.stream, i.payload, i.attempts + 1 FROM everdeck_item AS i
WHERE i.state = 0 AND (i.due_at <= ? OR i.due_at > ?) AND (i.key IS NULL OR NOT EXISTS (
    SELECT 1 FROM everdeck_item AS o
    WHERE o.stream = i.stream AND o.key = i.key AND o.state < 2 AND (o.state = 1 OR o.seq < i.seq)
))
ORDER BY i.seq LIMIT ?;

-- name: items_payloads
SELECT payload FROM everdeck_item ORDER BY seq;

-- name: items_next_due
SELECT min(due_at) FROM everdeck_item WHERE state = 0 AND due_at > ?;

-- name: feed_counts
SELECT
    (SELECT coalesce(sum(done), 0) FROM everdeck_stream),
    (SELECT count(*) FROM everdeck_item WHERE state = 0),
    (SELECT count(*) FROM everdeck_item WHERE state = 1),
    (SELECT count(*) FROM everdeck_item WHERE state = 2),
    (SELECT count(*) FROM everdeck_outbox WHERE state < 2),
    (SELECT count(*) FROM everdeck_outbox WHERE state = 2),
    (SELECT count(*) FROM everdeck_reader);

-- name: feed_items
SELECT i.seq, t.name, i.id, i.key, i.state, i.attempts, i.error, i.stored_at, i.due_at, i.payload
FROM everdeck_item AS i JOIN everdeck_stream AS t ON t.id = i.stream
WHERE (? IS NULL OR i.state = ?) AND (? IS NULL OR i.seq = ?) ORDER BY i.seq LIMIT ?;

-- name: feed_outbox
SELECT seq, outbox, key, state, attempts, error, put_at, due_at, payload FROM everdeck_outbox
WHERE (? IS NULL OR state = ?) AND (? IS NULL OR seq = ?) ORDER BY seq LIMIT ?;

-- name: facts
SELECT name, value FROM everdeck_fact;

-- name: fact_put
INSERT INTO everdeck_fact (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: promise_of
SELECT seq FROM everdeck_promise WHERE request = ?;

-- name: promise_add
INSERT INTO everdeck_promise (request, seq, at) VALUES (?, ?, ?);

-- name: promises_forget
DELETE FROM everdeck_promise WHERE at < ?;

-- name: items_lost
SELECT 1 FROM everdeck_item WHERE state = 1 AND seq NOT IN (SELECT seq FROM everdeck_claim) LIMIT 1;

-- name: after_add
INSERT OR IGNORE INTO everdeck_after (id) VALUES (?);

-- name: after_done
SELECT a.id FROM everdeck_after AS a WHERE NOT EXISTS (SELECT 1 FROM everdeck_item AS i WHERE i.id = a.id) LIMIT 500;

-- name: after_drop
DELETE FROM everdeck_after WHERE id = ?;

-- name: feed_done
SELECT d.seq, t.name, d.id, d.key, 3, d.attempts, NULL, d.stored_at, 0, d.payload
FROM everdeck_done AS d JOIN everdeck_stream AS t ON t.id = d.stream
WHERE (? IS NULL OR d.seq = ?) ORDER BY d.seq DESC LIMIT ?;

-- name: done_replay
INSERT OR IGNORE INTO everdeck_item (seq, stream, id, key, payload, stored_at)
SELECT seq, stream, id, key, payload, stored_at FROM everdeck_done WHERE seq = ?;

-- name: memory_get
SELECT value FROM everdeck_memory WHERE kind = ? AND key = ?;

-- name: memory_all
SELECT key, value FROM everdeck_memory WHERE kind = ?;

-- name: memory_set
INSERT INTO everdeck_memory (kind, key, value) VALUES (?, ?, ?)
ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value;

-- name: memory_rename
UPDATE OR REPLACE everdeck_memory SET kind = ? WHERE kind = ?;

-- name: memory_drop
DELETE FROM everdeck_memory WHERE kind = ? AND key = ?;
