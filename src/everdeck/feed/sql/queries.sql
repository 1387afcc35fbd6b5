-- Every statement of the feed, by name. Loaded by everdeck.feed.store.

-- name: version
SELECT max(version) FROM everdeck_feed_version;

-- name: stream
SELECT id, cursor, confirmed, floor, epoch, stored_at, done FROM everdeck_stream WHERE name = ?;

-- name: stream_add
INSERT INTO everdeck_stream (name, phase) VALUES (?, ?);

-- name: stream_advance
UPDATE everdeck_stream
SET phase = 'live', cursor = ?, confirmed = ?, floor = ?, epoch = ?, stored_at = ?,
    last_batch = coalesce(?, last_batch)
WHERE id = ?;

-- name: stream_done
UPDATE everdeck_stream SET done = done + ? WHERE id = ?;

-- name: last_seq
SELECT max((SELECT coalesce(max(seq), 0) FROM everdeck_seen), (SELECT coalesce(max(seq), 0) FROM everdeck_item));

-- name: seen
SELECT id, epoch, digest FROM everdeck_seen WHERE stream = ? AND id IN (SELECT value FROM json_each(?));

-- name: seen_add
INSERT INTO everdeck_seen (seq, stream, id, epoch, digest, stored_at) VALUES (?, ?, ?, ?, ?, ?);

-- name: seen_oldest
SELECT s.seq, s.stored_at, s.seq >= t.last_batch FROM everdeck_seen AS s JOIN everdeck_stream AS t ON t.id = s.stream
ORDER BY s.seq;

-- name: seen_forget
DELETE FROM everdeck_seen WHERE seq = ?;

-- name: item_add
INSERT INTO everdeck_item (seq, stream, id, key, payload, stored_at) VALUES (?, ?, ?, ?, ?, ?);

-- name: item_add_dead
INSERT INTO everdeck_item (seq, stream, id, key, payload, stored_at, state, attempts, error, died_at)
VALUES (?, ?, ?, ?, ?, ?, 2, ?, ?, ?);

-- name: items_waiting
SELECT seq, key, due_at, attempts, crashes FROM everdeck_item WHERE stream = ? AND state = 0 ORDER BY seq;

-- name: items_running
SELECT seq, attempts FROM everdeck_item WHERE stream = ? AND state = 1;

-- name: items_interrupted
-- Of several in flight nobody knows which one it was: all keep a last attempt.
UPDATE everdeck_item SET state = 0, crashes = crashes + 1, due_at = 0, attempts = min(attempts, ?)
WHERE stream = ? AND state = 1;

-- name: item_crashed_out
UPDATE everdeck_item SET state = 2, crashes = crashes + 1, died_at = ?, error = coalesce(error || '; ', '') || ?, told = 0
WHERE seq = ?
RETURNING seq, id, key, attempts, error;

-- name: items_take
SELECT seq, id, key, payload, attempts + 1, stored_at FROM everdeck_item
WHERE seq IN (SELECT value FROM json_each(?)) AND state = 0;

-- name: items_taken
UPDATE everdeck_item SET state = 1, attempts = attempts + 1
WHERE seq IN (SELECT value FROM json_each(?)) AND state = 0;

-- name: items_done
DELETE FROM everdeck_item WHERE seq IN (SELECT value FROM json_each(?));

-- name: item_done
DELETE FROM everdeck_item WHERE seq = ?;

-- name: item_retry
UPDATE everdeck_item SET state = 0, due_at = ?, error = ? WHERE seq = ?;

-- name: item_hand_back
UPDATE everdeck_item SET state = 0, attempts = attempts - 1, due_at = ? WHERE seq = ? AND state = 1;

-- name: item_dead
UPDATE everdeck_item SET state = 2, error = ?, died_at = ?, told = 0 WHERE seq = ?;

-- name: items_untold
SELECT seq, id, key, attempts, error FROM everdeck_item WHERE stream = ? AND state = 2 AND told = 0 LIMIT 100;

-- name: item_told
UPDATE everdeck_item SET told = 1 WHERE seq = ?;

-- name: waiting_count
SELECT count(*) FROM everdeck_item WHERE stream = ? AND state = 0;

-- name: busy_counts
SELECT coalesce(sum(state = 1), 0), coalesce(sum(state = 2), 0) FROM everdeck_item WHERE stream = ? AND state != 0;

-- name: dead_list
SELECT i.seq, t.name, i.id, i.key, i.attempts, i.crashes, i.error, i.stored_at, i.died_at, i.payload
FROM everdeck_item AS i JOIN everdeck_stream AS t ON t.id = i.stream
WHERE i.state = 2 AND (? IS NULL OR t.name = ?) AND (? IS NULL OR i.seq = ?)
ORDER BY i.seq LIMIT ?;

-- name: dead_retry
UPDATE everdeck_item SET state = 0, attempts = 0, crashes = 0, due_at = 0 WHERE seq = ? AND state = 2;

-- name: dead_drop
DELETE FROM everdeck_item WHERE seq = ? AND state = 2;

-- name: outbox_put
INSERT INTO everdeck_outbox (outbox, key, payload, put_at) VALUES (?, ?, ?, ?);

-- name: outbox_waiting
SELECT seq, key, due_at FROM everdeck_outbox WHERE outbox = ? AND state < 2 ORDER BY seq;

-- name: outbox_sending
UPDATE everdeck_outbox SET state = 1, attempts = attempts + 1 WHERE seq = ? AND state < 2
RETURNING key, payload, attempts;

-- name: outbox_sent
DELETE FROM everdeck_outbox WHERE seq = ?;

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
