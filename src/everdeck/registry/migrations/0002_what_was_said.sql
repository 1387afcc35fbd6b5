-- What a worker last said, why it was last found ill, and how often in a row it never became ready.

ALTER TABLE workers ADD COLUMN unready INTEGER NOT NULL DEFAULT 0;  -- ends in a row before it was ready
ALTER TABLE workers ADD COLUMN reason TEXT;                         -- of the last illness; none since it is well
ALTER TABLE workers ADD COLUMN status_text TEXT;                    -- the last STATUS= of the process that runs
