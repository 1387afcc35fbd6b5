-- What is written for every update, as one statement each: an insert into one of these views, of the writer's connection
-- alone. Nothing of it is in the file.

-- A batch and the cursor behind it. The rows come as one JSON array (number, id, key, epoch, where the payload begins in
-- the blob, its length, whether it has a digest) and the digests as one blob.
CREATE TEMP VIEW everdeck_batch AS
SELECT 0 AS refuse_known, 0 AS stream, 0 AS stored_at, '' AS batch, x'' AS payloads, x'' AS digests,
       NULL AS cursor, 0 AS confirmed, 0 AS floor, 0 AS epoch, NULL AS first_seq;

CREATE TEMP TRIGGER everdeck_batch_add INSTEAD OF INSERT ON everdeck_batch
BEGIN
    SELECT RAISE(ABORT, 'an id is known')
    WHERE new.refuse_known AND EXISTS (
        SELECT 1 FROM json_each(new.batch) AS b CROSS JOIN everdeck_seen AS s
        ON s.stream = new.stream AND s.id = b.value ->> 1
    );

    INSERT INTO everdeck_seen (seq, stream, id, epoch, digest, stored_at)
    SELECT value ->> 0, new.stream, value ->> 1, value ->> 3,
           CASE WHEN value ->> 6 THEN substr(new.digests, 1 + 8 * key, 8) END, new.stored_at
    FROM json_each(new.batch);

    INSERT INTO everdeck_item (seq, stream, id, key, payload, stored_at)
    SELECT value ->> 0, new.stream, value ->> 1, value ->> 2, substr(new.payloads, value ->> 4, value ->> 5),
           new.stored_at
    FROM json_each(new.batch);

    UPDATE everdeck_stream
    SET phase = 'live', cursor = new.cursor, confirmed = new.confirmed, floor = new.floor, epoch = new.epoch,
        stored_at = new.stored_at, last_batch = coalesce(new.first_seq, last_batch)
    WHERE id = new.stream;
END;

-- The same where all of it is plain: numbers that follow each other, one epoch, and no id twice (the index of what was
-- seen refuses that). Taking a row apart with ->> reads the whole row each time, so here each column is an array of its
-- own: half of the cost. Where a payload begins is told for each of them, and for the one that would come next.
-- Items that are done leave in the same statement, as below.
CREATE TEMP VIEW everdeck_plain_batch AS
SELECT 0 AS first_seq, 0 AS stream, 0 AS stored_at, '' AS ids, '' AS keys, '' AS begins, x'' AS payloads, x'' AS digests,
       NULL AS cursor, 0 AS confirmed, 0 AS floor, 0 AS epoch, 0 AS done_first, 0 AS done_last, '' AS done_seqs, 0 AS done,
       '' AS changes, x'' AS remembered;

CREATE TEMP TRIGGER everdeck_plain_batch_add INSTEAD OF INSERT ON everdeck_plain_batch
BEGIN
    INSERT INTO everdeck_seen (seq, stream, id, epoch, digest, stored_at)
    SELECT new.first_seq + key, new.stream, value, new.epoch, nullif(substr(new.digests, 1 + 8 * key, 8), x''),
           new.stored_at
    FROM json_each(new.ids);

    INSERT INTO everdeck_item (seq, stream, id, key, payload, stored_at)
    SELECT new.first_seq + key, new.stream, value, new.keys ->> key,
           substr(new.payloads, new.begins ->> key, (new.begins ->> (key + 1)) - (new.begins ->> key)), new.stored_at
    FROM json_each(new.ids);

    UPDATE everdeck_stream
    SET phase = 'live', cursor = new.cursor, confirmed = new.confirmed, floor = new.floor, epoch = new.epoch,
        stored_at = new.stored_at, last_batch = new.first_seq
    WHERE id = new.stream;

    INSERT INTO everdeck_ack (first, last, seqs, count, changes, remembered, stream)
    SELECT new.done_first, new.done_last, new.done_seqs, new.done, new.changes, new.remembered, new.stream
    WHERE new.done > 0;
END;

-- Items that are done: the first and the last of numbers that follow each other, or all of them as a JSON array, and how
-- many they are. And what they have changed in what is remembered: by kind and key, where the value begins in the blob
-- and its length (one number, begin << 31 | length: half of the cost of two), or null to forget it.
CREATE TEMP VIEW everdeck_ack AS
SELECT 0 AS first, 0 AS last, '' AS seqs, 0 AS count, '' AS changes, x'' AS remembered, 0 AS stream;

CREATE TEMP TRIGGER everdeck_ack_add INSTEAD OF INSERT ON everdeck_ack
BEGIN
    DELETE FROM everdeck_item WHERE seq BETWEEN new.first AND new.last;
    DELETE FROM everdeck_item WHERE seq IN (SELECT value FROM json_each(new.seqs));
    UPDATE everdeck_stream SET done = done + new.count WHERE id = new.stream;

    INSERT INTO everdeck_memory (kind, key, value)
    SELECT k.key, c.key, substr(new.remembered, c.value >> 31, c.value & 0x7fffffff)
    FROM json_each(new.changes) AS k, json_each(k.value) AS c WHERE c.value IS NOT NULL
    ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value;

    DELETE FROM everdeck_memory WHERE (kind, key) IN (
        SELECT k.key, c.key FROM json_each(new.changes) AS k, json_each(k.value) AS c WHERE c.value IS NULL
    );
END;

-- The same where there is nothing more than that to write.
CREATE TEMP VIEW everdeck_plain_ack AS SELECT 0 AS first, 0 AS last, 0 AS stream;

CREATE TEMP TRIGGER everdeck_plain_ack_add INSTEAD OF INSERT ON everdeck_plain_ack
BEGIN
    DELETE FROM everdeck_item WHERE seq BETWEEN new.first AND new.last;
    UPDATE everdeck_stream SET done = done + new.last - new.first + 1 WHERE id = new.stream;
END;
