// What one event makes of a worker's row, and of the whole map of rows. Pure: no clock, no request.
// It is a forecast: the row is confirmed by the daemon soon after. It exists so that fifty events a second
// are shown at once without fifty requests a second.

export const STATES = ['running', 'starting', 'unhealthy', 'backoff', 'failed', 'stopping', 'stopped', 'exited'];
export const KINDS = [
  'started', 'ready', 'adopted', 'stopping', 'stopped', 'exited', 'crashed', 'restarted', 'failed', 'reset',
  'unhealthy', 'killed', 'orphan-reaped', 'lock-conflict', 'log-rotated', 'owner-changed', 'feed',
];

const ALIVE = new Set(['running', 'starting', 'unhealthy', 'stopping']);
export const isAlive = (state) => ALIVE.has(state);

/** What needs a person first; then what is on its way; then what is quiet. */
export const ATTENTION = { failed: 0, unhealthy: 1, backoff: 2, starting: 3, stopping: 4, running: 5, exited: 6, stopped: 7 };

const STATE_AFTER = {
  started: 'running', ready: 'running', adopted: 'running', restarted: 'running', unhealthy: 'unhealthy',
  stopping: 'stopping', stopped: 'stopped', exited: 'exited', crashed: 'backoff', failed: 'failed', reset: 'stopped',
};

export function statusAfter(status, event) {
  const state = STATE_AFTER[event.kind];
  if (!state) return status;
  const detail = event.detail || {};
  const next = { ...status, state };
  if (event.kind === 'started' || event.kind === 'restarted') {
    next.started_at = event.at;
    next.pid = detail.pid ?? null;
    next.backoff_until = null;
    next.adopted = false;
  }
  if (event.kind === 'adopted') next.adopted = true;
  if (event.kind === 'restarted') next.restarts = (status.restarts || 0) + 1;
  if (event.kind === 'crashed') {
    next.crashes = (status.crashes || 0) + 1;
    if (detail.delay_seconds) next.backoff_until = new Date(Date.parse(event.at) + detail.delay_seconds * 1000).toISOString();
  }
  if (detail.exit) next.exit = detail.exit;
  if (!isAlive(state)) {
    next.pid = null;
    next.cpu_percent = null;
    next.rss_bytes = null;
    next.uptime_seconds = null;
  }
  return next;
}

export function countStates(statuses) {
  const counts = Object.fromEntries(STATES.map((state) => [state, 0]));
  for (const status of statuses) counts[status.state] = (counts[status.state] || 0) + 1;
  return counts;
}
