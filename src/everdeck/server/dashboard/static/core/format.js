// Values as people read them. Pure.

/** 4d 3h, 2h 5m, 3m 20s, 12s: two units at most. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return '–';
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s}s`;
  const m = Math.floor(s / 60);
  if (m < 60) return `${m}m ${s % 60}s`;
  const hours = Math.floor(m / 60);
  if (hours < 24) return `${hours}h ${m % 60}m`;
  return `${Math.floor(hours / 24)}d ${hours % 24}h`;
}

/** just now, 12s ago, 3m ago, 5h ago, 2d ago; or "in 4s". */
export function ago(at, now) {
  const seconds = Math.round((now - at) / 1000);
  if (seconds < -1) return `in ${span(-seconds)}`;
  return seconds <= 1 ? 'just now' : `${span(seconds)} ago`;
}

/** 12s, 3m, 5h, 2d: one unit. */
export function span(s) {
  if (s < 60) return `${s}s`;
  if (s < 3600) return `${Math.floor(s / 60)}m`;
  if (s < 86_400) return `${Math.floor(s / 3600)}h`;
  return `${Math.floor(s / 86_400)}d`;
}

export function absolute(at) {
  const date = new Date(at);
  if (Number.isNaN(date.getTime())) return '';
  return date.toLocaleString(undefined, { dateStyle: 'medium', timeStyle: 'medium' });
}

export function bytes(n) {
  if (n === null || n === undefined) return '–';
  if (n < 1e3) return `${n} B`;
  if (n < 1e6) return `${(n / 1e3).toFixed(0)} kB`;
  if (n < 1e9) return `${(n / 1e6).toFixed(n < 1e7 ? 1 : 0)} MB`;
  return `${(n / 1e9).toFixed(1)} GB`;
}

export function percent(n) {
  if (n === null || n === undefined) return '–';
  return `${n < 10 ? n.toFixed(1) : Math.round(n)}%`;
}

export const whole = (n) => Number(n).toLocaleString('en');

export const plural = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;

const SIGNALS = [
  '', 'SIGHUP', 'SIGINT', 'SIGQUIT', 'SIGILL', 'SIGTRAP', 'SIGABRT', 'SIGBUS', 'SIGFPE', 'SIGKILL', 'SIGUSR1', 'SIGSEGV', 'SIGUSR2', 'SIGPIPE', 'SIGALRM',
  'SIGTERM', 'SIGSTKFLT', 'SIGCHLD', 'SIGCONT', 'SIGSTOP', 'SIGTSTP', 'SIGTTIN', 'SIGTTOU', 'SIGURG', 'SIGXCPU', 'SIGXFSZ', 'SIGVTALRM', 'SIGPROF',
  'SIGWINCH', 'SIGIO', 'SIGPWR', 'SIGSYS',
];
const signalName = (number) => SIGNALS[number] || { 34: 'SIGRTMIN', 64: 'SIGRTMAX' }[number] || `signal ${number}`;

/** {kind: 'exited', code} | {kind: 'killed', signal, oom} | {kind: 'unknown'} → {text, tone}. An end that somebody asked for is not bad. */
export function exit(value, requested = false) {
  if (!value) return { text: '–', tone: 'quiet' };
  if (value.kind === 'exited') return { text: `exit ${value.code}`, tone: value.code === 0 || requested ? 'calm' : 'bad' };
  if (value.kind === 'killed') return { text: value.oom ? `${signalName(value.signal)}, out of memory` : signalName(value.signal), tone: requested && !value.oom ? 'calm' : 'bad' };
  return { text: 'unseen', tone: 'quiet' };
}

// --- what an event tells: the rules of everdeck/wording.py, held equal by tests/support/wordings.py -----------------

/** An event's detail in one line; what is empty is left out. */
export const detail = (event) => Object.entries(event.detail || {}).map(([key, value]) => entry(key, value)).filter(Boolean).join(', ');

const SENTENCES = new Set(['error', 'message', 'text', 'reason', 'why', 'status_text']);
const SPANS = { uptime_seconds: 'after', delay_seconds: 'next start in' };
const MOST_NAMED = 5;

function entry(key, value) {
  const name = key.replaceAll('_', ' ');
  if (value === null || value === undefined || value === false || value === '' || (typeof value === 'object' && !Object.keys(value).length)) return '';
  if (value === true) return name;
  if (Array.isArray(value)) return `${name} ${several(value)}`;
  if (typeof value === 'object') return ending(value) || `${name} ${inner(value)}`;
  if (typeof value === 'number' && key.endsWith('_seconds')) return `${SPANS[key] || name.replace(/ seconds$/, '')} ${Number(value.toFixed(2))} s`;
  return SENTENCES.has(key) ? String(value) : `${name} ${value}`;
}

function ending({ kind, code, signal, oom }) {
  if (kind === 'exited' && code !== undefined) return `exit code ${code}`;
  if (kind === 'killed' && signal !== undefined) return `killed by ${signalName(signal)}${oom ? ' (out of memory)' : ''}`;
  return kind === 'unknown' ? 'ended unseen' : '';
}

function inner(value) {
  if (Object.keys(value).sort().join() === 'command,pid') return `${value.pid} (${value.command})`;
  return Object.entries(value).map(([key, each]) => entry(key, each)).filter(Boolean).join(', ');
}

function several(values) {
  const shown = values.slice(0, MOST_NAMED).map((value) => (value && typeof value === 'object' ? inner(value) : String(value))).join(', ');
  return values.length > MOST_NAMED ? `${shown} and ${values.length - MOST_NAMED} more` : shown;
}
