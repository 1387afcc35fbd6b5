-- Every statement on the deck's registry, by name. Read by everdeck.registry.store.

-- name: get_meta
SELECT value FROM meta WHERE key = :key;

-- name: set_meta
INSERT INTO meta (key, value) VALUES (:key, :value) ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- name: all_workers
SELECT name, spec, desired, phase, cookie, boot_id, pid, start_ticks, pidfd_inode, cgroup, proxy_lock, started_at, port,
       exit, restarts, crashes, streak, crash_times, backoff_until, timers_boot_id, adopted, ready, unready, reason,
       status_text
FROM workers ORDER BY name;

-- name: save_worker
-- Not REPLACE: that deletes the row before it writes the new one, and each of both may rebalance pages of the table.
INSERT INTO workers (name, spec, desired, phase, cookie, boot_id, pid, start_ticks, pidfd_inode, cgroup, proxy_lock,
                     started_at, port, exit, restarts, crashes, streak, crash_times, backoff_until, timers_boot_id,
                     adopted, ready, unready, reason, status_text)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET
    spec = excluded.spec, desired = excluded.desired, phase = excluded.phase, cookie = excluded.cookie,
    boot_id = excluded.boot_id, pid = excluded.pid, start_ticks = excluded.start_ticks,
    pidfd_inode = excluded.pidfd_inode, cgroup = excluded.cgroup, proxy_lock = excluded.proxy_lock,
    started_at = excluded.started_at, port = excluded.port, exit = excluded.exit, restarts = excluded.restarts,
    crashes = excluded.crashes, streak = excluded.streak, crash_times = excluded.crash_times,
    backoff_until = excluded.backoff_until, timers_boot_id = excluded.timers_boot_id, adopted = excluded.adopted,
    ready = excluded.ready, unready = excluded.unready, reason = excluded.reason,
    status_text = excluded.status_text;

-- name: save_started
-- Only what a start changes: the row with its spec was written with the intent.
UPDATE workers SET phase = ?, boot_id = ?, pid = ?, start_ticks = ?, pidfd_inode = ?, cgroup = ?, started_at = ?
WHERE name = ?;

-- name: delete_worker
DELETE FROM workers WHERE name = :name;

-- name: append_event
INSERT INTO events (at, worker, kind, detail, asked) VALUES (?, ?, ?, ?, ?);

-- name: id_of_event_appended
SELECT last_insert_rowid();

-- name: events_after
SELECT id, at, worker, kind, detail FROM events WHERE id > :after ORDER BY id LIMIT :limit;

-- name: events_of_worker_after
SELECT id, at, worker, kind, detail FROM events WHERE worker = :worker AND id > :after ORDER BY id LIMIT :limit;

-- name: last_event_id
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'events'), 0);

-- name: go_on_after_event
REPLACE INTO sqlite_sequence (rowid, name, seq)
VALUES ((SELECT rowid FROM sqlite_sequence WHERE name = 'events'), 'events', :id);

-- name: forget_events_up_to
DELETE FROM events WHERE id <= :id AND asked = 0;

-- name: forget_asked_events
-- None of those that are kept whether asked or not: whoever reads on after an id would meet a gap.
DELETE FROM events
WHERE asked = 1 AND id <= :id AND id <= (SELECT id FROM events WHERE asked = 1 ORDER BY id DESC LIMIT 1 OFFSET :kept);

-- name: note_request
REPLACE INTO requests (id, worker, event, at) VALUES (?, ?, ?, ?);

-- name: requests_done
SELECT worker FROM requests WHERE id = :id AND event IS NOT NULL;

-- name: requests_begun
SELECT worker, id FROM requests WHERE event IS NULL;

-- name: forget_requests
DELETE FROM requests WHERE at < :before;

-- name: forget_requests_begun
DELETE FROM requests WHERE event IS NULL;

-- name: forget_oldest_feed_events
DELETE FROM events WHERE id IN (
    SELECT id FROM events WHERE kind = 'feed' ORDER BY id
    LIMIT (SELECT count(*) / 2 + 1 FROM events WHERE kind = 'feed')
);
