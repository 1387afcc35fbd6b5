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

const SIGNALS = {
  1: 'SIGHUP', 2: 'SIGINT', 3: 'SIGQUIT', 4: 'SIGILL', 6: 'SIGABRT', 7: 'SIGBUS', 8: 'SIGFPE', 9: 'SIGKILL',
  10: 'SIGUSR1', 11: 'SIGSEGV', 12: 'SIGUSR2', 13: 'SIGPIPE', 14: 'SIGALRM', 15: 'SIGTERM', 24: 'SIGXCPU', 31: 'SIGSYS',
};

/** {kind: 'exited', code} | {kind: 'killed', signal} | {kind: 'unknown'} → {text, tone} */
export function exit(value) {
  if (!value) return { text: '–', tone: 'quiet' };
  if (value.kind === 'exited') return { text: `exit ${value.code}`, tone: value.code === 0 ? 'calm' : 'bad' };
  if (value.kind === 'killed') return { text: SIGNALS[value.signal] || `signal ${value.signal}`, tone: 'bad' };
  return { text: 'unknown', tone: 'quiet' };
}

/** An event's detail in one line. */
export function detail(event) {
  const parts = [];
  for (const [key, value] of Object.entries(event.detail || {})) {
    if (value === null || value === undefined || value === '') continue;
    if (key === 'exit' && typeof value === 'object') parts.push(exit(value).text);
    else if (typeof value === 'object') parts.push(`${words(key)} ${JSON.stringify(value)}`);
    else if (typeof value === 'number' && key.endsWith('_seconds')) parts.push(`${SPANS[key] || words(key.slice(0, -8))} ${Number(value.toFixed(2))} s`);
    else if (['message', 'text', 'reason', 'why'].includes(key)) parts.push(String(value));
    else parts.push(`${words(key)} ${value}`);
  }
  return parts.join(' · ');
}

const SPANS = { uptime_seconds: 'after', delay_seconds: 'next start in' };
const words = (key) => key.replaceAll('_', ' ');
