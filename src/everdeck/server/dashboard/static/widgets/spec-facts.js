// What the worker was asked to be: command, directory, policies, environment keys. Values of the environment are not
// sent to the page, and secrets are known to it by name only.
import { html } from '../core/html.js';
import { bytes, duration } from '../core/format.js';
import { Icon } from './icons.js';

export function SpecFacts({ spec }) {
  const { command = [], restart = {}, stop = {}, limits = {}, log = {}, labels = {} } = spec;
  const limited = Object.entries(limits || {}).filter(([, value]) => value !== null && value !== undefined);
  return html`
    <section class="panel" aria-label="Spec">
      <header class="panel-head"><h2>Spec</h2></header>
      <pre class="command" tabindex="0">${command.map(quoted).join(' ')}</pre>
      <dl class="facts">
        <div><dt>Directory</dt><dd><code>${spec.cwd || 'its data directory'}</code></dd></div>
        <div><dt>Restart</dt><dd>${restart.policy}, ${restart.backoff_seconds}–${restart.backoff_cap_seconds} s backoff</dd></div>
        <div><dt>Stop</dt><dd>SIG${stop.signal}, then SIGKILL after ${stop.grace_seconds} s</dd></div>
        <div><dt>Health</dt><dd>${healthText(spec.health)}</dd></div>
        <div><dt>Limits</dt><dd>${limited.length ? limited.map(([key, value]) => `${key.replaceAll('_', ' ')} ${key.endsWith('bytes') ? bytes(value) : value}`).join(', ') : 'none'}</dd></div>
        <div><dt>Sandbox</dt><dd>${sandboxText(spec.sandbox)}</dd></div>
        ${spec.user && html`<div><dt>Runs as</dt><dd>${spec.user === 'auto' ? 'an account of its own' : spec.user}</dd></div>`}
        <div><dt>Log</dt><dd>rotates at ${bytes(log.max_bytes)}, keeps ${log.keep}${log.max_age_seconds ? `, at most ${duration(log.max_age_seconds)} old` : ''}</dd></div>
        ${Object.keys(labels || {}).length > 0 && html`<div><dt>Labels</dt><dd>${Object.entries(labels).map(([key, value]) => html`<span class="key-chip" key=${key}>${key}=${value}</span>`)}</dd></div>`}
      </dl>
    </section>`;
}

export function EnvKeys({ spec }) {
  const keys = spec.env_keys || [];
  const secrets = spec.secret_names || [];
  return html`
    <section class="panel" aria-label="Environment">
      <header class="panel-head"><h2>Environment</h2><span class="quiet">values stay on the server</span></header>
      ${keys.length + secrets.length === 0 ? html`<p class="panel-empty">Nothing beyond the clean default.</p>` : html`
      <ul class="key-list">
        ${keys.map((key) => html`<li key=${`e${key}`} class="key-chip">${key}</li>`)}
        ${secrets.map((key) => html`<li key=${`s${key}`} class="key-chip is-secret"><${Icon} name="lock" size=${12} /><span class="unseen">secret </span>${key}</li>`)}
      </ul>`}
    </section>`;
}

function healthText(health) {
  if (!health) return 'no checks';
  const how = health.http || health.tcp || (health.command ? health.command.join(' ') : null);
  const parts = [];
  if (how) parts.push(`${how} every ${health.interval_seconds} s`);
  if (health.notify) parts.push('says when it is ready');
  if (health.watchdog_seconds) parts.push(`watchdog ${health.watchdog_seconds} s`);
  return parts.join(', ') || 'no checks';
}

function sandboxText(sandbox) {
  const { level = 'off', read = [], write = [], tcp_connect: connect = [], tcp_bind: bind = [] } = sandbox || {};
  const listed = [['reads', read], ['writes', write], ['connects to port', connect], ['listens on port', bind]].filter(([, list]) => list === 'any' || list.length);
  return [level, ...listed.map(([title, list]) => `${title} ${list === 'any' ? 'any' : list.join(', ')}`)].join('; ');
}

const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
